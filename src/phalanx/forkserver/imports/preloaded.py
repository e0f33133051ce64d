"""Modules that the fork server has imported, hidden from a worker until its script imports them.

    modules.load("torch")     in the fork server: import it, and record what the import did
    modules.hide()            in the fork server: sys.modules is as it was before
    modules.begin(…)          in a worker, before its script
    import torch              in its script: the modules reappear, without being executed again

They are hidden before the fork, because that touches thousands of objects: a worker would copy their pages.

An import may read environment variables. If the script has changed one of them since, `stale` is called before the
modules reappear: the worker then restarts as a fresh interpreter, in which that value counts.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from .. import hidden_modules

_finalize: Any = weakref.finalize
_FINALIZE = _finalize._exitfunc  # registered by the very first finalizer

Environment = dict[bytes, bytes]
Changed = dict[str, "str | None"]  # variable -> its value now; None: not set

# Variables that native libraries read while they are loaded, which cannot be recorded. TQDM_ is searched for in all
# variables.
_NATIVE = tuple(
    b"""
    OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ GOTO_ BLIS_ ONEDNN_ DNNL_ MKLDNN_ GFORTRAN_ ATEN_ NPY_ NUMPY_ TORCH_ PYTORCH_ KINETO_
    ACC_ INTEL_LIBITTNOTIFY I_MPI_ OPENSSL_ GLIBCXX_ CUDA_LAUNCH_BLOCKING CUBLASLT_ CUBLAS_LOG CASK_ NVRTC_ LIBNVVM_
    NV_NVVM_ LLVM_OVERRIDE_ PTXAS_ AS_SECURE_ TRITON_ TQDM_ MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE
    """.split()
)
_READ_LATER = (b"TORCH_NCCL_", b"TORCH_FR_", b"TORCH_HOME", b"TORCH_EXTENSIONS_DIR")
# Recorded, but their values are not stored.
_NOT_KEPT = frozenset(b"TMPDIR TEMP TMP LOGNAME USER LNAME USERNAME PYTHONUSERBASE".split())


class Layer:
    """The effects of one import."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.modules: dict[str, ModuleType] = {}
        self.reads: dict[bytes, set[str]] = {}  # variable -> modules that were being imported
        self.imports: dict[str, set[str]] = {}  # module -> modules that it imports
        self.writes: Environment = {}
        self.exits: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []  # module, arguments of atexit.register

    def in_root_package(self, name: str) -> bool:
        """Return whether the module is in the same top-level package as the root."""
        return name.partition(".")[0] == self.root.partition(".")[0]

    def dependencies(self, name: str) -> list[str]:
        """Return the modules that reappear together with a module outside the root's package."""
        return [name.rpartition(".")[0], *self.imports.get(name, ())]


class Preloaded:
    """The modules, and the finder and loader of those that are hidden."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._environment: Environment = {}  # environment during the imports
        self._hidden: dict[str, Layer] = {}  # the modules themselves are in `hidden_modules`, too
        self._parents: dict[str, ModuleType] = {}  # parents of hidden modules, whose attributes are removed meanwhile
        self._replaced: dict[int, tuple[Any, Any]] = {}  # spec and loader of a module that is reappearing
        self._launcher_variables: set[bytes] = set()  # variables that the launcher set for this worker
        self._stale: Callable[[Changed], None] = lambda _: None

    def load(self, root: str) -> None:
        """Import a module in the fork server. Raises the exception of the import."""
        layer = Layer(root)
        self._layers.append(layer)
        self._environment = self._environment or environment()
        before = frozenset(sys.modules)
        try:
            with _recorded(layer):
                importlib.import_module(root)
        finally:
            if "__mp_main__" not in before:  # the main module, by the name that multiprocessing gives it
                sys.modules.pop("__mp_main__", None)
            layer.modules = {name: module for name, module in list(sys.modules.items()) if name not in before}

    def hide(self) -> None:
        """Hide the modules in the fork server, and so in the workers that it forks."""
        for layer in reversed(self._layers):
            for name, module in layer.modules.items():
                if sys.modules.get(name) is module:
                    self._hide(name, module, layer)
            for _, function, _, _ in layer.exits:
                atexit.unregister(function)
                _finalize._registered_with_atexit &= function != _FINALIZE
        if self._hidden:
            sys.meta_path.insert(0, self)

    def begin(self, assumed: frozenset[str], stale: Callable[[Changed], None]) -> None:
        """Prepare a worker. `assumed`: variables that were set for the imports because the script is expected to set
        them.
        """
        self._stale = stale
        now = environment()
        changed = {name for name in {*now, *self._environment} if now.get(name) != self._environment.get(name)}
        self._launcher_variables = changed - {os.fsencode(name) for name in assumed}

    def loaded(self, name: str) -> bool:
        """Return whether a module was imported before the fork."""
        return any(name in layer.modules for layer in self._layers)

    def forget(self, name: str) -> None:
        """Let an import of a hidden module find another one. Modules that have imported the hidden one keep it."""
        if hidden_modules.forget(name):
            del self._hidden[name]

    def abandon(self) -> None:
        """Drop the modules without clearing them, at the very end of a worker: clearing would copy their pages in each
        rank.
        """
        for layer in self._layers:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(layer.modules))
            for name, module in layer.modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]

    def _hide(self, name: str, module: ModuleType, layer: Layer) -> None:
        package, _, child = name.rpartition(".")
        parent = layer.modules.get(package) or sys.modules.get(package)  # `from package import child` finds it there
        if parent is not None and vars(parent).get(child) is module:
            with contextlib.suppress(AttributeError, TypeError):  # an object that only acts as a module
                delattr(parent, child)
                self._parents[name] = parent
        self._hidden[name] = layer
        hidden_modules.modules[name] = module
        del sys.modules[name]

    # -- the import system's interface

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return a spec for a hidden module."""
        if name not in self._hidden:
            return None
        known = getattr(self._hidden[name].modules[name], "__spec__", None)
        spec = ModuleSpec(name, self, origin=getattr(known, "origin", None))  # type: ignore[arg-type]
        spec.submodule_search_locations = getattr(known, "submodule_search_locations", None)
        spec.has_location = getattr(known, "has_location", False)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a hidden module reappear, with its dependencies."""
        layer = self._hidden.get(spec.name)
        if layer is None:  # another thread has imported it meanwhile
            return sys.modules[spec.name]
        parts = self._closure(spec.name)
        changed = {name: value for part in parts for name, value in self._changed(*part).items()}
        if changed:
            self._stale(changed)
        module = layer.modules[spec.name]
        self._replaced[id(module)] = (getattr(module, "__spec__", None), getattr(module, "__loader__", None))
        for part in parts:
            self._reveal(*part)
        return module

    def _closure(self, name: str) -> list[tuple[Layer, set[str]]]:
        """Return this module and its dependencies, by layer. A module of a root's package includes the whole layer."""
        found: set[str] = set()
        whole: set[str] = set()  # roots of layers that are in `waiting` already
        waiting = [name]
        while waiting:
            module = waiting.pop()
            if module not in self._hidden or module in found:
                continue
            found.add(module)
            layer = self._hidden[module]
            if not layer.in_root_package(module):
                waiting += layer.dependencies(module)
            elif layer.root not in whole:
                whole.add(layer.root)
                waiting += layer.modules
        parts = [(layer, found & layer.modules.keys()) for layer in self._layers]
        return [(layer, part) for layer, part in parts if part]

    def exec_module(self, module: ModuleType) -> None:
        """Restore attributes that the import system has just replaced. The module was executed in the fork server."""
        if id(module) in self._replaced:
            module.__spec__, module.__loader__ = self._replaced.pop(id(module))
        hidden_modules.call_waiting()

    def get_code(self, name: str) -> Any:
        """Return the code for runpy, which executes a module under another name: `-m cProfile`."""
        return self._loader(name).get_code(name)

    def get_source(self, name: str) -> Any:
        """Return the source of a module."""
        return self._loader(name).get_source(name)

    def get_filename(self, name: str) -> Any:
        """Return the file of a module."""
        return self._loader(name).get_filename(name)

    def is_package(self, name: str) -> Any:
        """Return whether a module is a package."""
        return self._loader(name).is_package(name)

    def _loader(self, name: str) -> Any:
        layer = self._hidden.get(name)
        return (sys.modules[name] if layer is None else layer.modules[name]).__loader__

    def _reveal(self, layer: Layer, part: set[str]) -> None:
        new = part & self._hidden.keys()
        for name in new:
            del self._hidden[name], hidden_modules.modules[name]
            module = sys.modules.setdefault(name, layer.modules[name])
            if name in self._parents:
                setattr(self._parents.pop(name), name.rpartition(".")[2], module)
        if "multiprocessing" in new:  # multiprocessing gives this name to the main module of that time
            sys.modules["__mp_main__"] = sys.modules["__main__"]
        for importer, function, args, kwargs in layer.exits:
            if importer in new and not (function == _FINALIZE and _finalize._registered_with_atexit):
                atexit.register(function, *args, **kwargs)
                _finalize._registered_with_atexit |= function == _FINALIZE
        if layer.root in new:
            for variable, value in layer.writes.items():
                os.environb.setdefault(variable, value)
        if not self._hidden and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _changed(self, layer: Layer, part: set[str]) -> Changed:
        """Return the variables whose values differ from those that the modules read when they were imported."""
        readers = {name for name in part if name.partition(".")[0] not in sys.stdlib_module_names}
        if not readers:
            return {}
        native = environment()
        by_python = {name for name, by in layer.reads.items() if by & readers}
        by_native = {name for name in {*native, *self._environment} if _is_native(name)}
        changed = {}
        for names, now in ((by_python, os.environb), (by_native, native)):
            for name in names - self._launcher_variables - _NOT_KEPT:
                value = now.get(name)
                if value != self._environment.get(name):
                    changed[os.fsdecode(name)] = None if value is None else os.fsdecode(value)
        return dict(sorted(changed.items()))


def environment() -> Environment:
    """Return the environment as C sees it: `os.environ` does not show changes by `os.putenv`."""
    found = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    variables: Environment = {}
    place = 0
    while found and (entry := found[place]) is not None:
        name, _, value = entry.partition(b"=")
        variables.setdefault(name, value)
        place += 1
    return variables


def _is_native(name: bytes) -> bool:
    return name.startswith(_NATIVE) and not name.startswith(_READ_LATER)


def _importing(frame: FrameType) -> str:
    """Return the module that is being imported in this frame."""
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


@contextlib.contextmanager
def _recorded(layer: Layer) -> Iterator[None]:
    """Record imports, variables that are read and written, and functions registered with atexit."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    register, plain, by_name = atexit.register, builtins.__import__, importlib.import_module
    recording = True

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
        found = plain(name, globals, locals, fromlist, level)  # libraries pass these by keyword, too
        importer = (globals or {}).get("__name__") or ""
        if not importer or importer.startswith(
            ("importlib.", "_frozen_importlib")
        ):  # a native module that is being initialized
            importer = _importing(sys._getframe(1))
        package = (globals or {}).get("__package__") or importer.rpartition(".")[0]
        full = importlib.util.resolve_name("." * level + name, package) if level else name
        imported = layer.imports.setdefault(importer, set())
        imported.add(full)
        imported.update(f"{full}.{item}" for item in fromlist or ())
        return found

    def import_module(name: str, package: str | None = None) -> Any:
        full = importlib.util.resolve_name(name, package) if name.startswith(".") else name
        layer.imports.setdefault(_importing(sys._getframe(1)), set()).add(full)
        return by_name(name, package)

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        if recording:
            layer.exits.append((_importing(sys._getframe(1)), function, args, kwargs))
        return register(function, *args, **kwargs)

    os.environ._data = _Variables(data, layer)  # type: ignore[attr-defined]
    atexit.register = note  # type: ignore[assignment]
    builtins.__import__ = import_
    importlib.import_module = import_module
    try:
        yield
    finally:
        os.environ._data, atexit.register, recording = data, register, False  # type: ignore[attr-defined]
        builtins.__import__, importlib.import_module = plain, by_name


class _Variables:
    """Replaces the data of `os.environ` during an import."""

    def __init__(self, data: Environment, layer: Layer) -> None:
        self._data = data
        self._layer = layer

    def __getitem__(self, name: bytes) -> bytes:
        frame = sys._getframe(2)  # the caller of os.environ
        if frame.f_code.co_name not in ("__iter__", "copy"):  # a copy of all variables does not count as a read
            self._layer.reads.setdefault(name, set()).add(_importing(frame))
        return self._data[name]

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._layer.writes[name] = value
        self._data[name] = value

    def __delitem__(self, name: bytes) -> None:
        self._layer.writes.pop(name, None)
        del self._data[name]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
