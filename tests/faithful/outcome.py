"""The result of one run: its exit code, each rank's streams, and files; masked, and compared field by field.

differences(torchrun_outcome, phalanx_outcome)  -> [Difference("rank 0 stdout", "…")]
"""

from __future__ import annotations

import difflib
import fnmatch
import gzip
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# What differs between two runs of one launcher.
MASKS = (
    (r"0x[0-9a-f]{6,}", "0x"),  # addresses
    (r"[WIE]\d{4} \d\d:\d\d:\d\d\.\d+ *\d*", "W"),  # torch's log lines: date, time, pid or thread
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*", "TIME"),
    (r"(127\.0\.0\.1|localhost|::1)\]?:\d+", "HOST:PORT"),
    (r"\bpid[ =:]+\d+", "pid"),
    (r"/dev/shm/\w+|psm_\w+", "SHM"),
)
UNNAMED = re.compile(r"[a-z0-9_]{8}")  # the random part of a temporary file's name
CACHES = ("torchinductor_*", "__pycache__", "*.pyc")
HEADER = ("--- torchrun", "+++ phalanx")
SHOWN = re.compile(r"<(\d+)>(.*)")  # a line of a rank on the console, see runs.PREFIX


@dataclass(frozen=True)
class Outcome:
    code: int | None  # exit code of the worker that failed first; None: the run did not end
    streams: Mapping[str, str] = field(default_factory=dict)  # "rank 0 stdout" -> text
    files: Mapping[str, str] = field(default_factory=dict)  # path -> content
    seconds: float = 0.0
    note: str = ""

    def fields(self) -> dict[str, str]:
        code = "does not end" if self.code is None else str(self.code)
        return {"exit code": code, **self.streams, **{f"file {path}": text for path, text in self.files.items()}}


@dataclass(frozen=True)
class Difference:
    field: str
    text: str  # a diff, torchrun's lines with a minus

    @property
    def lines(self) -> list[str]:
        """Return the lines that only one side has."""
        return [line[1:] for line in self._changed()]

    @property
    def brief(self) -> str:
        """Return the first line of each side."""
        firsts = (next((line for line in self._changed() if line[0] == sign), sign) for sign in "-+")
        return " | ".join(line[:110] for line in firsts)

    def _changed(self) -> list[str]:
        return [line for line in self.text.split("\n") if line[:1] in ("+", "-") and line not in HEADER]


def differences(theirs: Outcome, ours: Outcome) -> list[Difference]:
    """Return the differences. A run that did not end is a single difference: its results are unknown."""
    left, right = theirs.fields(), ours.fields()
    if None in (theirs.code, ours.code):
        left, right = ({"exit code": one["exit code"]} for one in (left, right))
    names = [*left, *(name for name in right if name not in left)]
    return [
        Difference(name, diff(left.get(name), right.get(name))) for name in names if left.get(name) != right.get(name)
    ]


def diff(theirs: str | None, ours: str | None) -> str:
    theirs, ours = ("(missing)" if text is None else text for text in (theirs, ours))
    lines = difflib.unified_diff(theirs.split("\n"), ours.split("\n"), *(line[4:] for line in HEADER), lineterm="", n=1)
    return "\n".join(line[:300] for line in lines)


def worker_code(code: int, report: str) -> int:
    """Return the exit code of the worker that torchrun reports as the root cause, as in a shell; torchrun's own is
    1.
    """
    found = re.findall(r"exitcode\s*: (-?\d+)", report.partition("Root Cause")[2] or report)
    if code != 1 or not found:
        return code
    worker = int(found[0])
    return 128 - worker if worker < 0 else worker


def mask(text: str, more: Iterable[str] = ()) -> str:
    for pattern, name in (*MASKS, *((pattern, "MASKED") for pattern in more)):
        text = re.sub(pattern, name, text)
    return text


def logs(folder: str, ranks: int, masks: Iterable[str] = ()) -> dict[str, str]:
    """Return each rank's streams, from the log files that both launchers write in the same places; empty if none
    began.
    """
    run = next(iter(os.listdir(folder)), "")
    found = {}
    for rank in range(ranks):
        for stream in ("stdout", "stderr"):
            path = os.path.join(folder, run, "attempt_0", str(rank), f"{stream}.log")
            found[f"rank {rank} {stream}"] = mask(_text(path), masks) if os.path.exists(path) else ""
    return found


def shown(text: str, rank: int) -> str:
    """Return the lines of one rank on the console, as they are in its log."""
    lines = (SHOWN.fullmatch(line) for line in text.split("\n"))
    return "\n".join(line[2] for line in lines if line and line[1] == str(rank))


def files(folder: str, ignore: Iterable[str] = (), masks: Iterable[str] = ()) -> dict[str, str]:
    """Return every file below the folder, with its content."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _matches(name, CACHES))
        for name in sorted(names):
            path = os.path.relpath(os.path.join(place, name), folder)
            if not _matches(name, CACHES) and not any(_matches(part, ignore) for part in (path, path.split("/")[0])):
                found[mask(path, masks)] = mask(content(os.path.join(folder, path)), masks)
    return found


def content(path: str) -> str:
    """Return the content as text. For archives, their members: archives also contain their creation time."""
    if os.path.islink(path):
        return f"-> {os.readlink(path)}"
    try:
        if path.endswith(".gz"):
            with gzip.open(path) as file:
                return _decoded(file.read())
        if path.endswith((".zip", ".pyz", ".pt", ".ckpt")):
            with zipfile.ZipFile(path) as archive:
                return "\n".join(f"{name}: {_decoded(archive.read(name))}" for name in archive.namelist())
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        return f"{type(error).__name__}: {os.path.getsize(path)} bytes"
    return _text(path)


def leftovers(folder: str) -> str:
    """Return the names left in a folder for temporary files, without their random parts."""
    names = (name for name in os.listdir(folder) if not _matches(name, CACHES))
    return "\n".join(sorted(UNNAMED.sub("*", name) for name in names))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return _decoded(file.read())


def _decoded(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
