"""What this worker tells its launcher about its end: torchrun's error.json, which `phalanx run` reads as well.

Written where the exception was caught and not where the interpreter ends, so that its time is that of the cause.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import traceback

from phalanx.errors import PhalanxError
from phalanx.forkserver import paths

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_FRAMES = 3  # the innermost, which tell most
_OURS = tuple(paths.ROOT + folder for folder in paths.ENTRY)


def write(error: BaseException) -> None:
    """Nothing without a launcher that asks for it; and an earlier report is never replaced, for it is the cause.

    Our own frames, down to the script's, are left out of `frames`.
    """
    now = time.time()
    path = os.environ.get(VARIABLE)
    if not path or _has_something(path):
        return
    # Told in words, so that where it was raised is of no interest.
    if isinstance(error, PhalanxError) or getattr(error, "in_words", False):
        text = story = str(error)
        frames = []
    else:
        text = f"{type(error).__name__}: {error}"
        story = "".join(traceback.format_exception(error))
        below = itertools.dropwhile(
            lambda frame: frame.filename.startswith(_OURS), traceback.extract_tb(error.__traceback__)
        )
        frames = list(below)[-_FRAMES:]
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
