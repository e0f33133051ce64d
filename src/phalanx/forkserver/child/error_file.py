"""The file that tells why a worker ended: torchrun's error.json, and when, to the microsecond."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from typing import Any

_GROUPS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "collectives", "")
_BETWEEN_RANKS = re.compile(r"gloo|nccl|store|socket|peer|timed? ?out|barrier|\bLate\b|Connection", re.IGNORECASE)
_THEIRS = ("<frozen", os.path.join(os.path.dirname(os.__file__), ""))


def write(path: str, kind: Any, value: Any, trace: Any) -> None:
    """Called while the interpreter reports an exception: must not raise, must not replace an earlier report."""
    now = time.time()
    try:
        if os.path.exists(path) and os.path.getsize(path):
            return  # torch's own @record has been here
        frames = traceback.extract_tb(trace)
        while frames and frames[-1].filename.startswith(_GROUPS):  # where a wait was given up is of no interest
            frames.pop()
        if isinstance(value, SyntaxError) and value.filename:
            frames.append(
                traceback.FrameSummary(value.filename, value.lineno or 0, "", line=(value.text or "").strip())
            )
        said = _said(value)
        text = f"{kind.__name__}: {said}"
        story = "".join(traceback.format_exception(kind, value, trace))
        if getattr(value, "in_words", False):  # where it was raised is of no interest
            story, frames = text, traceback.StackSummary()
        record = {
            "message": {
                "message": text,
                "extraInfo": {
                    "py_callstack": story,
                    "timestamp": str(int(now)),
                },
            },
            "time": now,
            "exception": kind.__name__,
            "text": said,
            "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in _shown(frames)],
        }
        with open(f"{path}.part", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)
    except Exception:
        pass


def _said(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return "<exception str() failed>"  # as Python's own traceback has it


def tell(value: Any, trace: Any) -> None:
    """To the agent, where this rank was in its groups when it lost the others: it is about to end."""
    with contextlib.suppress(Exception):
        if not _BETWEEN_RANKS.search(f"{type(value).__name__}: {value}"):
            return
        from ..probe import probe

        if probe.current is not None:
            probe.current.raised(trace)


def _shown(frames: list[Any]) -> list[Any]:
    """The last ones, and in any case the innermost of the user's own: libraries raise deep inside."""
    own = [frame for frame in frames if not frame.filename.startswith(_THEIRS) and "-packages" not in frame.filename]
    return frames[-3:] if not own or own[-1] in frames[-3:] else [own[-1], *frames[-2:]]
