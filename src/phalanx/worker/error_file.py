"""The error file of a worker, for its launcher: torchrun's error.json, which `phalanx run` reads too.

It is written where the exception was caught, not when the interpreter ends, so that its time is the time of the cause.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence

from phalanx.errors import PhalanxError
from phalanx.forkserver import paths
from phalanx.forkserver.child import error_file as printed

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_FRAMES = 3  # the innermost, which are the most informative
_OURS = tuple(paths.ROOT + folder for folder in paths.ENTRY)


def write(error: BaseException) -> None:
    """Write the error, if the launcher requests it. An earlier report is never replaced: it is the cause.

    Frames of phalanx above those of the script are omitted from `frames`.
    """
    now = time.time()
    path = os.environ.get(VARIABLE)
    if not path or _has_something(path):
        return
    in_words = isinstance(error, PhalanxError) or bool(getattr(error, "in_words", False))
    if in_words:
        text = story = str(error)
        frames = script_frames(error) if isinstance(error, PhalanxError) else []
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
        "in_words": in_words,  # the message contains all lines that matter
        "code": getattr(error, "exit_code", 1),  # the exit code of the process
        "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in frames],
    }
    with contextlib.suppress(OSError):
        with open(f"{path}.part", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)


def script_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the innermost frames of the script: the call that phalanx rejected, without the frames of phalanx."""
    found = traceback.extract_tb(error.__traceback__)
    return [frame for frame in found if is_script(frame.filename)][-_FRAMES:]


def is_script(file: str) -> bool:
    """Return whether a file is not part of phalanx, or is one of its demos."""
    return not file.startswith(paths.ROOT) or file.startswith(tuple(paths.ROOT + one for one in paths.USER_CODE))


def in_lines(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """Return frames as text: two lines each."""
    found = []
    for frame in frames:
        found.append(f"{frame.filename}:{frame.lineno} in {frame.name}")
        if frame.line:
            found.append(f"    {frame.line}")
    return found


def print_once(text: str) -> None:
    """Print the message of an error that was written. The launcher shows it once, however many ranks print it."""
    path = os.environ.get(VARIABLE)
    if path:
        printed.write_printed(path, text)
    sys.stderr.write(text)


def _has_something(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False
