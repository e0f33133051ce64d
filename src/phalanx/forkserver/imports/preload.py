"""What is imported before the fork, and whether it is safe to fork afterwards."""

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

from ..child import gloo_groups
from .preloaded import Preloaded

ROOM = 128  # descriptors up to the limit that imports may leave open
_MOST_FDS = 4096

modules = Preloaded()  # of this process, and hidden in those that it forks


def preload(required: list[str], welcome: list[str], path0: str | None) -> dict[str, Any]:
    """Import `required` and, where it works, `welcome`; report the times, the failures and what is unsafe.

    The script's folder stands first in sys.path meanwhile, as it will when the script imports the same names.
    The collector is off: a start-up makes no garbage worth looking for, and objects frozen afterwards are not
    touched by a worker's collections, so their pages stay shared.
    """
    guard = None if path0 is None else _Guard(path0, {name.partition(".")[0] for name in required} - {"torch"})
    if path0 is not None:
        sys.path.insert(0, path0)
        sys.meta_path.insert(sys.meta_path.index(PathFinder), guard)  # type: ignore[arg-type]
    gc.disable()
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    with _low_descriptors_taken():
        for name in [*required, *welcome]:
            if name in sys.modules:
                continue
            start = time.perf_counter()
            try:
                modules.load(name)
            except BaseException as error:
                if name in required:
                    failed[name] = f"{type(error).__name__}: {error}"
            seconds[name] = round(time.perf_counter() - start, 4)
    if guard is not None:
        sys.meta_path.remove(guard)  # type: ignore[arg-type]
        failed.update(guard.met)
        if path0 in sys.path:
            sys.path.remove(path0)
    gloo_groups.watch()
    if "tempfile" in sys.modules:  # an import has asked for it, and a script may set TMPDIR before it does
        sys.modules["tempfile"].__dict__["tempdir"] = None
    gc.freeze()
    gc.enable()
    return {"seconds": seconds, "failed": failed, "unsafe": unsafe()}


@contextlib.contextmanager
def _low_descriptors_taken() -> Iterator[None]:
    """What native libraries leave open gets a high number: a script's first file is to be 3, as ever."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = (_MOST_FDS if soft == resource.RLIM_INFINITY else min(soft, _MOST_FDS)) - ROOM
    taken = []
    with contextlib.suppress(OSError):
        while end > ROOM:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            if taken[-1] >= end:
                break
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


class _Guard:
    """A finder that keeps the script's own modules from being executed here, such as a `glob.py` that torch would find.

    Each rank executes them itself, as often as Python would. Only modules that the user has named are imported here.
    """

    def __init__(self, folder: str, named: set[str]) -> None:
        self._folder = folder
        self._named = named
        self.met: dict[str, str] = {}

    def find_spec(self, name: str, path: object, _: object) -> None:
        if path is None and name not in self._named:
            found = PathFinder.find_spec(name, [self._folder])
            if found is not None and found.loader is not None and found.origin != _elsewhere(name):
                self.met[name] = f"{found.origin} has its name"
                raise ImportError(self.met[name], name=name)


def _elsewhere(name: str) -> str | None:
    """What would be found without the script's folder: it may be the same, where a package is installed in place."""
    found = PathFinder.find_spec(name, sys.path[1:])
    return None if found is None else found.origin


def unsafe() -> str:
    """Why this process must not be forked, or nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if (cuda is not None and cuda.is_initialized()) or _holds("/dev/nvidia-uvm"):
        return "CUDA was initialised while importing"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"importing started a thread ({', '.join(others)})"
    return ""


def _holds(path: str) -> bool:
    """The driver's memory device is opened by cuInit and by nothing else: it tells even where torch does not know."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                return True
        except OSError:
            continue
    return False


def note_lesson(path: str) -> None:
    """When this worker ends, write down what it had to import itself: the next fork server may do so beforehand."""
    atexit.register(_write_lesson, path, frozenset(sys.modules))


def _write_lesson(path: str, before: frozenset[str]) -> None:
    import contextlib
    import json

    new = [name for name, module in list(sys.modules.items()) if name not in before and _installed(module)]
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
    """Of an installed package: a user's own modules are edited between runs and must be read anew."""
    file = getattr(module, "__file__", None) or ""
    return f"{os.sep}site-packages{os.sep}" in file
