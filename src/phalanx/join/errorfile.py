"""What this worker tells its launcher about its end: torchrun's error.json, which `phalanx run` reads as well.

Written where the exception was caught and not where the interpreter ends, so that its time is that of the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback

from phalanx.errors import PhalanxError

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_FRAMES = 3  # the innermost, which tell most


def write(error: BaseException) -> None:
    """Nothing without a launcher that asks for it; and an earlier report is never replaced, for it is the cause.

    The first frame is that of whoever calls this, and is left out of `frames`.
    """
    now = time.time()
    path = os.environ.get(VARIABLE)
    if not path or _has_something(path):
        return
    if isinstance(error, PhalanxError) or getattr(
        error, "in_words", False
    ):  # it is told in words, and where it was raised is of no interest
        text = story = str(error)
        frames = []
    else:
        text = f"{type(error).__name__}: {error}"
        story = "".join(traceback.format_exception(error))
        frames = traceback.extract_tb(error.__traceback__)[1:][-_FRAMES:]
    record = {
        "message": {"message": text, "extraInfo": {"py_callstack": story, "timestamp": str(int(now))}},
        "time": now,
        "exception": type(error).__name__,
        "text": str(error),
        "code": getattr(error, "exit_code", 1),  # that the process will end with, if it gets to its end
        "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in frames],
    }
    with contextlib.suppress(OSError):
        with open(f"{path}.part", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)


def _has_something(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False
