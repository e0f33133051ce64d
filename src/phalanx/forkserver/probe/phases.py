"""Classifies code by its file: its phase, and whether it is user code.

Called once per code object; a sample then compares no strings.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .. import paths

_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_TYPED = ("<string>", "<stdin>", "<ipython-input")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

# Prefix of a path below torch -> its phase; the first match counts. Empty: the caller decides.
_TORCH = (
    ("distributed/rendezvous.py", "join"),
    ("distributed/device_mesh.py", "join"),
    ("distributed/_functional_collectives.py", "collective"),
    ("distributed/nn/", "collective"),
    ("distributed/checkpoint/", "checkpoint"),
    ("serialization.py", "checkpoint"),
    ("utils/data/", "data"),
    ("optim/", "optimizer"),
    ("amp/grad_scaler.py", "optimizer"),
    ("nn/utils/clip_grad.py", "optimizer"),
    ("autograd/__init__.py", "backward"),
    ("autograd/graph.py", "backward"),
    ("nn/", "forward"),
    # Runs compiled code, does not compile.
    ("_dynamo/eval_frame.py", ""),
    ("_dynamo/external_utils.py", ""),
    ("_dynamo/", "compile"),
    ("_inductor/output_code.py", ""),
    ("_inductor/cudagraph_trees.py", ""),
    ("_inductor/utils.py", ""),
    ("_inductor/runtime/", ""),
    ("_inductor/", "compile"),
    ("_functorch/_aot_autograd/runtime_wrappers.py", ""),
    ("_functorch/_aot_autograd/utils.py", ""),
    ("_functorch/_aot_autograd/", "compile"),
    ("_functorch/aot_autograd.py", "compile"),
    ("_functorch/partitioners.py", "compile"),
)
# Below an installed package
_OTHERS = (
    ("triton/compiler/", "compile"),
    ("triton/backends/", "compile"),
    ("triton/runtime/autotuner.py", "compile"),
    ("safetensors/", "checkpoint"),
    ("datasets/", "data"),
    ("torchdata/", "data"),
    ("webdataset/", "data"),
    ("streaming/", "data"),
)

_MAX_CODES = 4096  # code objects that are cached
_FUNCTION = 1  # inspect.CO_OPTIMIZED: a function, not the lines of a module or class

_C10D = "distributed/distributed_c10d.py"
_JOINS = frozenset(
    (
        *("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"),
        *("_new_group_with_tag", "_new_process_group_helper", "_store_based_barrier", "destroy_process_group"),
    )
)
# Functions that neither join nor wait
_ASKS = ("get_", "is_", "_get_", "_rank_not_in", "_group_or", "_check", "_ensure", "_canonicalize", "_world", "pg_")


class CodeKind(NamedTuple):
    """The classification of a code object."""

    phase: str  # empty: not known
    own: bool  # user code
    calls: bool  # part of torch.distributed: may be about to record something
    loads: bool  # an import
    top: bool  # a module's own lines


def kind(code: CodeType) -> CodeKind:
    """Classify a code object."""
    file, name = code.co_filename, code.co_name
    if file.startswith("<"):
        return CodeKind("", False, False, file.startswith("<frozen importlib"), False)  # Python's own, or generated
    below = _below_torch(file)
    if below is not None:
        phase = _of_torch(below, name) if code.co_flags & _FUNCTION else ""  # else it is being imported
        return CodeKind(phase, False, below.startswith(("distributed/", "nn/parallel/")), False, False)
    if file.startswith(paths.ROOT):
        path = file[len(paths.ROOT) :]
        own = path.startswith(paths.USER_CODE)
        joins = path.startswith(paths.COLLECTIVES) and name == "__init__"  # torch's own frame shows that
        return CodeKind("" if own or joins else _first(paths.PHASES, path), own, False, False, name == "<module>")
    for folder in _INSTALLED:
        _, found, path = file.rpartition(folder)
        if found:
            return CodeKind(_first(_OTHERS, path), False, False, False, False)
    return CodeKind("", not file.startswith(_LIBRARY), False, False, name == "<module>")


def own_file(file: str) -> bool:
    """Return whether it is user code: not Python's, not installed, not phalanx's."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    if file.startswith(paths.ROOT):
        return file[len(paths.ROOT) :].startswith(paths.USER_CODE)
    return not file.startswith(_LIBRARY) and not any(folder in file for folder in _INSTALLED)


def _below_torch(file: str) -> str | None:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    root = os.path.dirname(torch) + os.sep if torch else ""
    if root and file.startswith(root):
        return file[len(root) :]
    return None


def _of_torch(path: str, name: str) -> str:
    if path == _C10D:
        if name in _JOINS:
            return "join"
        return "" if name.startswith(_ASKS) else "collective"
    if path.startswith("_inductor/runtime/") and ("autotune" in name or "benchmark" in name or "compile" in name):
        return "compile"
    return _first(_TORCH, path)


def _first(table: tuple[tuple[str, str], ...], path: str) -> str:
    return next((phase for start, phase in table if path.startswith(start)), "")


class StackClassifier:
    """Classifies the stack of a thread, frame by frame."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[CodeType, CodeKind]] = {}  # by id of the code

    def classify(self, frame: FrameType | None) -> tuple[str, list[Any], bool]:
        """Return phase, place, and whether the innermost frame is in torch.distributed. The innermost known phase
        counts.
        """
        kinds = self._kinds
        phase = ""
        place: list[Any] = []
        calls: bool | None = None
        inside = False  # in a function of user code
        while frame is not None and not (phase and place):
            code = frame.f_code
            known = kinds.get(id(code))
            if known is None:
                known = self._classify_code(code)
            found = known[1]
            if calls is None:
                calls = found.calls
            if found.own:
                inside = inside or not found.top
                if not place:
                    place = [code.co_filename, frame.f_lineno or 0, code.co_name]
            if not phase:
                phase = ("idle" if inside else "import") if found.loads else found.phase
            frame = frame.f_back
        return phase or "idle", place, bool(calls)

    def _classify_code(self, code: CodeType) -> tuple[CodeType, CodeKind]:
        """Classify a code object. Cached by id, because hashing one hashes all its parts. Kept alive so that the id
        stays unique.
        """
        if len(self._kinds) >= _MAX_CODES:
            self._kinds.clear()
        known = self._kinds[id(code)] = (code, kind(code))
        return known
