"""The file that says why a worker ended: torchrun's error.json, plus the time to the microsecond."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from typing import Any

from .. import log

_COLLECTIVES = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "collectives", ""
)
_BETWEEN_RANKS = re.compile(r"gloo|nccl|store|socket|peer|timed? ?out|barrier|\bLate\b|Connection", re.IGNORECASE)
_STANDARD_LIBRARY = ("<frozen", os.path.join(os.path.dirname(os.__file__), ""))


def write(path: str, kind: Any, value: Any, trace: Any) -> None:
    """Write the file. Called while the interpreter reports an exception: must not raise, and must not replace a
    report.
    """
    now = time.time()
    try:
        if os.path.exists(path) and os.path.getsize(path):
            return  # written by torch's @record
        frames = traceback.extract_tb(trace)
        while frames and frames[-1].filename.startswith(_COLLECTIVES):  # where a wait was aborted is not interesting
            frames.pop()
        if isinstance(value, SyntaxError) and value.filename:
            frames.append(
                traceback.FrameSummary(value.filename, value.lineno or 0, "", line=(value.text or "").strip())
            )
        message = _str(value)
        text = f"{kind.__name__}: {message}"
        stack = "".join(traceback.format_exception(kind, value, trace))
        if getattr(value, "in_words", False):  # where it was raised is not interesting
            stack, frames = text, traceback.StackSummary()
        record = {
            "message": {
                "message": text,
                "extraInfo": {
                    "py_callstack": stack,
                    "timestamp": str(int(now)),
                },
            },
            "time": now,
            "exception": kind.__name__,
            "text": message,
            "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in _shown(frames)],
        }
        with open(f"{path}.part", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)
    except Exception:
        log.swallowed("forkserver.child.error_file")


def _str(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        log.swallowed("forkserver.child.error_file")
        return "<exception str() failed>"  # as in Python's own tracebacks


def report(value: Any, trace: Any) -> None:
    """Report to the agent what this rank was doing in its groups when it lost the others: it is about to exit."""
    try:
        if not _BETWEEN_RANKS.search(f"{type(value).__name__}: {value}"):
            return
        from ..probe import probe

        if probe.current is not None:
            probe.current.report_exception(trace)
    except Exception:  # the script's own exception is reported next
        log.swallowed("forkserver.child.error_file")


def _shown(frames: list[Any]) -> list[Any]:
    """Return the last frames, and in any case the innermost one of user code: libraries raise deep inside."""
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_STANDARD_LIBRARY) and "-packages" not in frame.filename
    ]
    return frames[-3:] if not own or own[-1] in frames[-3:] else [own[-1], *frames[-2:]]
