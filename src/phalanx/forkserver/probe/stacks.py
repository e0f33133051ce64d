"""The Python stacks of this process, the innermost frame first."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from .. import paths

_MOST = 64  # threads
_DEEP = 80  # frames of one

_OURS = tuple(paths.ROOT + folder for folder in paths.PROBE)
_main = threading.main_thread().ident or 0


def main() -> FrameType | None:
    return sys._current_frames().get(_main)


def threads() -> list[dict[str, Any]]:
    """Of all threads but ours, the main one first. No lock is taken: who holds it may be what hangs."""
    found = []
    for ident, frame in sys._current_frames().items():
        rows = frames(frame, _DEEP)
        if rows[-1][0].startswith(_OURS):
            continue
        known = threading._active.get(ident)  # type: ignore[attr-defined]
        name = getattr(known, "_name", None) or f"thread {ident}"
        found.append({"name": name, "main": ident == _main, "frames": rows})
    found.sort(key=lambda one: not one["main"])
    return found[:_MOST]


def awaited() -> list[str]:
    """Names of the threads that Python waits for at the end."""
    known = list(threading._active.items())  # type: ignore[attr-defined]
    return [thread.name for ident, thread in known if ident != _main and not thread.daemon][:_MOST]


def frames(frame: FrameType | None, most: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    while frame is not None and len(found) < most:
        found.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
        frame = frame.f_back
    return found
