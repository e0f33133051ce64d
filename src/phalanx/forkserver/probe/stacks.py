"""The Python stacks of this process, innermost frame first."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from .. import paths, thread_frames

_MAX_THREADS = 64  # threads
_MAX_FRAMES = 80  # frames per thread

_OURS = tuple(paths.ROOT + folder for folder in paths.PROBE)
_main = threading.main_thread().ident or 0


def main() -> FrameType | None:
    """Return the innermost frame of the main thread; only inside `thread_frames.reading()`."""
    return sys._current_frames().get(_main)


def threads() -> list[dict[str, Any]]:
    """Return the stacks of all threads except phalanx's, the main one first. Takes no lock of the script: its
    holder may hang.
    """
    found = []
    with thread_frames.reading():
        stacks = [(ident, frames(frame, _MAX_FRAMES)) for ident, frame in sys._current_frames().items()]
    for ident, rows in stacks:
        if rows[-1][0].startswith(_OURS):
            continue
        known = threading._active.get(ident)  # type: ignore[attr-defined]
        name = getattr(known, "_name", None) or f"thread {ident}"
        found.append({"name": name, "main": ident == _main, "frames": rows})
    found.sort(key=lambda one: not one["main"])
    return found[:_MAX_THREADS]


def non_daemon() -> list[str]:
    """Return the names of the threads that Python waits for at exit."""
    known = list(threading._active.items())  # type: ignore[attr-defined]
    return [thread.name for ident, thread in known if ident != _main and not thread.daemon][:_MAX_THREADS]


def frames(frame: FrameType | None, most: int) -> list[list[Any]]:
    """Return at most `most` frames as [file, line, function]."""
    found: list[list[Any]] = []
    while frame is not None and len(found) < most:
        found.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
        frame = frame.f_back
    return found
