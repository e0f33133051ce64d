"""The files that say why a worker ended.

error.json       torchrun's, plus the time to the microsecond
traceback.txt    the traceback, or the text of sys.exit, as it is printed: the console finds it by this text, and shows
                 it once
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

from .. import log

_COLLECTIVES = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "collectives", ""
)
_BETWEEN_RANKS = re.compile(r"gloo|nccl|store|socket|peer|timed? ?out|barrier|\bLate\b|Connection", re.IGNORECASE)
_STANDARD_LIBRARY = ("<frozen", os.path.join(os.path.dirname(os.__file__), ""))
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # Python 3.13 writes tracebacks in colour on a terminal
_HINT = re.compile(r"\. Did you [^\n]*\?")
TRACEBACK = "traceback.txt"  # beside error.json
_LARGEST = 1 << 20  # characters of a traceback: a larger one is only in the log


def write_printed(path: str, text: str) -> None:
    """Write what is about to be printed about the failure, beside the error file. Must not raise."""
    try:
        if len(text) > _LARGEST:
            return
        name = os.path.join(os.path.dirname(path), TRACEBACK)
        with open(f"{name}.part", "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(_COLOUR.sub("", text))
        os.replace(f"{name}.part", name)
    except Exception:
        log.swallowed("forkserver.child.error_file")


def write(path: str, kind: Any, value: Any, trace: Any, printed: str = "") -> None:
    """Write the file. Called while the interpreter reports an exception: must not raise, and must not replace a
    report.

    `printed`: the traceback as Python prints it. Only there are its hints ("Did you mean: …?") before Python 3.12.
    """
    now = time.time()
    printed = _COLOUR.sub("", printed)
    try:
        if os.path.exists(path) and os.path.getsize(path):
            _add_hint(path, kind, printed)
            return  # written by phalanx.main, or by torch's @record
        frames = traceback.extract_tb(trace)
        while frames and frames[-1].filename.startswith(_COLLECTIVES):  # where a wait was aborted is not interesting
            frames.pop()
        if isinstance(value, SyntaxError) and value.filename:
            frames.append(
                traceback.FrameSummary(value.filename, value.lineno or 0, "", line=(value.text or "").strip())
            )
        message = _str(value)
        text = f"{kind.__name__}: {message}"
        text += hint(text, printed)
        stack = printed or "".join(traceback.format_exception(kind, value, trace))
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
        _replace(path, record)
    except Exception:
        log.swallowed("forkserver.child.error_file")


def write_exit(path: str, code: int, message: str, stack: Any, when: float) -> None:
    """Write where `sys.exit` was called, unless a report exists. Must not raise."""
    try:
        if os.path.exists(path) and os.path.getsize(path):
            return
        text = "".join(["Traceback (most recent call last):\n", *stack.format(), message, "\n"])
        record = {
            "message": {"message": message, "extraInfo": {"py_callstack": text, "timestamp": str(int(when))}},
            "time": when,
            "exception": "SystemExit",
            "text": message,
            "code": code,
            "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in _shown(stack)],
        }
        _replace(path, record)
    except Exception:
        log.swallowed("forkserver.child.error_file")


def _replace(path: str, record: dict[str, Any]) -> None:
    with open(f"{path}.part", "w") as file:
        json.dump(record, file)
    os.replace(f"{path}.part", path)


def hint(text: str, printed: str) -> str:
    """Return the text that Python prints after the first line of a message: ". Did you mean: 'rate'?".

    torch may put "[rank0]: " before the message. Output of other threads and finalizers may follow it.
    """
    _, message, rest = printed.rpartition(text)
    found = _HINT.search(rest) if message and "\n" not in text else None
    return found[0] if found else ""


def _add_hint(path: str, kind: Any, printed: str) -> None:
    """Add the hint to a report of phalanx.main, which is written before the traceback is printed."""
    with open(path) as file:
        record = json.load(file)
    message = record["message"]
    if record.get("exception") != kind.__name__ or not isinstance(message, dict):
        return
    found = hint(message["message"], printed)
    if found:
        message["message"] += found
        _replace(path, record)


def _str(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        log.swallowed("forkserver.child.error_file")
        return "<exception str() failed>"  # as in Python's own tracebacks


def report(value: Any, trace: Any, send: Callable[[Any], None] | None) -> None:
    """Report to the agent what this rank was doing in its groups when it lost the others. Called just before it
    exits.

    `send`: sends the report; None: this process has no probe.
    """
    try:
        if send is not None and _BETWEEN_RANKS.search(f"{type(value).__name__}: {value}"):
            send(trace)
    except Exception:  # the script's own exception is reported next
        log.swallowed("forkserver.child.error_file")


def _shown(frames: list[Any]) -> list[Any]:
    """Return the last frames and always the innermost frame of user code: libraries raise deep inside."""
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_STANDARD_LIBRARY) and "-packages" not in frame.filename
    ]
    return frames[-3:] if not own or own[-1] in frames[-3:] else [own[-1], *frames[-2:]]
