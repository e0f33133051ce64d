"""Reads the flight recorders of this process: torch's two, one for NCCL and one for all others, and phalanx's own.

The lock of torch's recorders is never held by a thread that waits for the GIL, so they can be read while a collective
hangs. They do not contain phalanx's groups: those have their own recorder, without a lock.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import io
import json
import pickle
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ... import linux, log, paths

RECORDERS = ("fr", "nccl", "phalanx")
WORLD = "torch.distributed.distributed_c10d"
_C10D = "torch._C._distributed_c10d"
_QUIET = 0.25  # seconds: NCCL's watchdog polls ten times a second


def is_initialized() -> bool:
    """Return whether there is a default process group. torch.distributed may be half imported."""
    module = sys.modules.get(WORLD)
    group = getattr(module, "GroupMember", None)
    return getattr(group, "WORLD", None) is not None


def read(recorder: str, *, collectives: bool) -> dict[str, Any]:
    """Return the status and, if requested, the entries of a recorder."""
    if recorder == "phalanx":
        return _read_ours(collectives=collectives)
    dump = getattr(sys.modules.get(_C10D), f"_dump_{recorder}_trace_json", None)
    if dump is None:
        return {}
    found = json.loads(dump(includeCollectives=collectives))
    return found if isinstance(found, dict) else {}


def _read_ours(*, collectives: bool) -> dict[str, Any]:
    """Read the recorder of phalanx's groups, which needs no copy and has sites."""
    recorder_module: Any = sys.modules.get(paths.FLIGHT_RECORDER)
    if not hasattr(recorder_module, "entries"):  # not imported, or half imported
        return {}
    return {"pg_status": recorder_module.status(), "entries": recorder_module.entries() if collectives else []}


def read_with_sites(recorder: str) -> dict[str, Any]:
    """Return status and entries with their call sites. The data is pickled by torch in this process."""
    if recorder == "phalanx":
        return _read_ours(collectives=True)
    dump = getattr(sys.modules.get(_C10D), f"_dump_{recorder}_trace", None)
    if dump is None:
        return {}
    if recorder == "nccl":
        if not read(recorder, collectives=False).get("pg_status"):  # do not initialize CUDA
            return {}
        linux.relax_capture_mode()
        if not _is_idle():
            return read(recorder, collectives=False)
    try:
        with without_compiler():
            text = dump(includeCollectives=True, includeStackTraces=True)
        found = _PlainUnpickler(io.BytesIO(text)).load()
    except Exception:  # another version of torch: without call sites
        log.swallowed("forkserver.probe.collectives.recorders")
        return read(recorder, collectives=True)
    return found if isinstance(found, dict) else {}


class _CompilerStub:
    """Replaces torch._inductor in one thread; other threads get the real module."""

    def __init__(self) -> None:
        self._thread = _thread.get_ident()

    def __getattr__(self, name: str) -> Any:
        if _thread.get_ident() != self._thread:
            return getattr(importlib.import_module("torch._inductor"), name)
        if name == "codecache":
            return SimpleNamespace(PyCodeCache=SimpleNamespace(stack_frames_for_code=lambda *_: None))
        raise AttributeError(name)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Prevent torch from importing torch._inductor, which takes seconds. To name a frame, torch asks it whether it
    generated the code. If it is not imported, it has not.
    """
    torch = sys.modules["torch"]
    if "_inductor" in torch.__dict__:
        yield
        return
    stub = _CompilerStub()
    torch.__dict__["_inductor"] = stub
    try:
        yield
    finally:
        if torch.__dict__.get("_inductor") is stub:
            del torch.__dict__["_inductor"]


def _is_idle() -> bool:
    """Return whether no operation completes: NCCL's recorder queries CUDA events that its watchdog may destroy."""
    before = read("nccl", collectives=False).get("pg_status")
    time.sleep(_QUIET)
    return before == read("nccl", collectives=False).get("pg_status")


class _PlainUnpickler(pickle.Unpickler):
    """Loads lists, dicts, strings and numbers, which torch marks with functions that return them unchanged."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle":
            return lambda value, *_: value
        raise pickle.UnpicklingError(f"{module}.{name}")
