"""Imports modules before the fork, and checks whether it is safe to fork afterwards."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import Any

from .. import linux, log
from ..child import gloo_groups
from .preloaded import Preloaded

RESERVED = 128  # descriptors below the limit that imports may leave open
_MAX_FDS = 4096

modules = Preloaded()  # of this process; hidden in those that it forks


def preload(required: list[str], optional: list[str], path0: str | None) -> dict[str, Any]:
    """Import `required` and, if possible, `optional`. Return times, failures, and what makes a fork unsafe.

    The script's folder is first in sys.path meanwhile, as it is when the script imports the same names. The collector
    is off: there is no garbage yet, and the objects are frozen afterwards, so collections in workers do not touch them
    and their pages stay shared.
    """
    guard = (
        None if path0 is None else _ScriptModuleGuard(path0, {name.partition(".")[0] for name in required} - {"torch"})
    )
    if path0 is not None:
        sys.path.insert(0, path0)
        sys.meta_path.insert(sys.meta_path.index(PathFinder), guard)  # type: ignore[arg-type]
    gc.disable()
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    with _low_descriptors_taken():
        for name in [*required, *optional]:
            if name in sys.modules:
                continue
            start = time.perf_counter()
            try:
                modules.load(name)
            except BaseException as error:  # a module may call sys.exit
                log.swallowed("forkserver.imports.preload")
                if name in required:
                    failed[name] = f"{type(error).__name__}: {error}"
            seconds[name] = round(time.perf_counter() - start, 4)
    if guard is not None:
        sys.meta_path.remove(guard)  # type: ignore[arg-type]
        failed.update(guard.blocked)
        if path0 in sys.path:
            sys.path.remove(path0)
    gloo_groups.install()
    if "tempfile" in sys.modules:  # an import may have set it; a script may set TMPDIR first
        sys.modules["tempfile"].__dict__["tempdir"] = None
    gc.freeze()
    gc.enable()
    return {"seconds": seconds, "failed": failed, "unsafe": unsafe()}


@contextlib.contextmanager
def _low_descriptors_taken() -> Iterator[None]:
    """Occupy low descriptors: descriptors that native libraries leave open get high numbers, and a script's first file
    is 3.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = (_MAX_FDS if soft == resource.RLIM_INFINITY else min(soft, _MAX_FDS)) - RESERVED
    taken = []
    with contextlib.suppress(OSError):
        while end > RESERVED:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            if taken[-1] >= end:
                break
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


class _ScriptModuleGuard:
    """A finder that prevents the script's own modules from being executed here, such as a `glob.py` that torch would
    import.

    Each rank executes them itself, as often as Python would. Only modules that the user names are imported here.
    """

    def __init__(self, folder: str, named: set[str]) -> None:
        self._folder = folder
        self._named = named
        self.blocked: dict[str, str] = {}

    def find_spec(self, name: str, path: object, _: object) -> None:
        if path is None and name not in self._named:
            found = PathFinder.find_spec(name, [self._folder])
            if found is not None and found.loader is not None and found.origin != _elsewhere(name):
                self.blocked[name] = f"{found.origin} has its name"
                raise ImportError(self.blocked[name], name=name)


def _elsewhere(name: str) -> str | None:
    """Return what an import finds without the script's folder. It is the same if a package is installed in place."""
    found = PathFinder.find_spec(name, sys.path[1:])
    return None if found is None else found.origin


def unsafe() -> str:
    """Return why this process must not be forked, or ""."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # Only cuInit opens the driver's memory device, so this detects CUDA even if torch does not know.
    if (cuda is not None and cuda.is_initialized()) or linux.holds("/dev/nvidia-uvm"):
        return "CUDA was initialised while importing"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"importing started a thread ({', '.join(others)})"
    return ""


def record_hints(path: str) -> None:
    """At exit, record the modules that this worker imported itself, so that the next fork server imports them before
    the fork.
    """
    atexit.register(_write_hints, path, frozenset(sys.modules))  # without the hidden modules


def _write_hints(path: str, before: frozenset[str]) -> None:
    import contextlib
    import json

    found = [(name, module) for name, module in list(sys.modules.items()) if name not in before]
    new = [name for name, module in found if not modules.loaded(name) and _installed(module)]
    if not new:
        return
    known: list[str] = []
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        known = json.load(file)
    with contextlib.suppress(OSError):
        with open(f"{path}.{os.getpid()}", "w") as file:
            json.dump(list(dict.fromkeys([*known, *new])), file)
        os.replace(f"{path}.{os.getpid()}", path)


def _installed(module: Any) -> bool:
    """Return whether a module belongs to an installed package: a user's own modules change between runs."""
    file = getattr(module, "__file__", None) or ""
    return f"{os.sep}site-packages{os.sep}" in file
