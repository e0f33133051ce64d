"""The error file of a worker, for its launcher: torchrun's error.json, which `phalanx run` reads too.

It is written where the exception was caught, not when the interpreter ends, so that its time is that of the cause.
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
_FRAMES = 3  # the innermost, which say most
_OURS = tuple(paths.ROOT + folder for folder in paths.ENTRY)


def write(error: BaseException) -> None:
    """Write the error, if the launcher asks for it. An earlier report is never replaced: it is the cause.

    Frames of phalanx above those of the script are left out of `frames`.
    """
    now = time.time()
    path = os.environ.get(VARIABLE)
    if not path or _has_something(path):
        return
    # The message is enough: where it was raised does not matter.
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
        "code": getattr(error, "exit_code", 1),  # the exit code that the process will end with
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
