"""The lines that metrics.jsonl has when a training begins or resumes.

earlier = EarlierLines(path, resumed_at=120)
earlier.prepare()
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import BinaryIO

from phalanx.contract.regular_file import open_regular
from phalanx.errors import CheckpointError

PREVIOUS = "metrics.{}.jsonl"  # of earlier trainings in this folder
OURS = frozenset(("step", "epoch", "time", "rank"))
_BLOCK = 1 << 16
_TAIL = 1 << 20  # bytes of the file that are compared with values of other ranks, which arrive some seconds later


class EarlierLines:
    """The lines of the training before it resumed at a step; 0: a new training."""

    def __init__(self, path: str, resumed_at: int) -> None:
        self._path = path
        self._resumed_at = resumed_at
        # names in the lines of the step from which the run resumes
        self._repeated: Counter[tuple[str, ...]] = Counter()
        self._logged: set[tuple[int, str]] | None = None  # of rank 0: steps and values, once they are read

    def prepare(self) -> None:
        """Cut the file after the step, or rename it for a new training.

        Raises OSError, and CheckpointError if it is not a regular file.
        """
        self._repeated = _prepare(self._path, self._resumed_at)

    def has_line(self, step: int, names: tuple[str, ...], *, expect_again: bool) -> bool:
        """Return whether the file has a line of this step with these names, which the script logs again.

        `expect_again`: this line is new, and the script may log it again.
        """
        if step == self._resumed_at and expect_again:
            self._repeated[names] += 1
        elif step == self._resumed_at and self._repeated[names]:
            self._repeated[names] -= 1
            return True
        return False

    def has_values(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether rank 0 had logged these values, not long ago."""
        if self._logged is None:
            self._logged = _logged(self._path, self._resumed_at)
        return (step, repr(dict(values))) in self._logged


def _prepare(path: str, resumed_at: int) -> Counter[tuple[str, ...]]:
    """Cut the file for a resumed training, and return the names in the lines of the step from which it resumes. For a
    new training, rename the file of the previous one.
    """
    with contextlib.suppress(FileNotFoundError):
        if resumed_at == 0:
            if os.path.getsize(path):
                os.replace(path, _free(os.path.dirname(path)))
        else:
            with open(path, "r+b", opener=open_regular) as file:
                end = cut(file, resumed_at)
                file.seek(end)
                # Lines of other ranks are not in order: they arrive up to some seconds later.
                others = [line for line in file.read().splitlines(keepends=True) if _step(line, "rank") <= resumed_at]
                file.truncate(end)
                file.seek(end)
                file.writelines(others)
                return _last_names(file, file.tell(), resumed_at)
    return Counter()


def _last_names(file: BinaryIO, end: int, step: int) -> Counter[tuple[str, ...]]:
    file.seek(max(0, end - _BLOCK))
    found: Counter[tuple[str, ...]] = Counter()
    for line in file.read(_BLOCK).splitlines():
        if _step(line) != step:
            continue
        found[tuple(name for name in json.loads(line) if name not in OURS - {"rank"})] += 1
    return found


def _logged(path: str, until: int) -> set[tuple[int, str]]:
    """Return the steps and values of rank 0's lines up to a step, at the end of the file."""
    found: set[tuple[int, str]] = set()
    with contextlib.suppress(OSError, CheckpointError), open(path, "rb", opener=open_regular) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        for line in file:
            if _own_step(line) <= until:
                row = json.loads(line)
                with contextlib.suppress(TypeError, ValueError):  # a line that another program has written
                    found.add((row["step"], repr({name: float(row[name]) for name in row if name not in OURS})))
    return found


def _free(folder: str) -> str:
    """Return a name that no earlier training has used."""
    number = 1
    while os.path.exists(path := os.path.join(folder, PREVIOUS.format(number))):
        number += 1
    return path


def cut(file: BinaryIO, step: int) -> int:
    """Return the end of rank 0's lines up to `step`. Reads from the end, because usually little is cut.

    A line that is incomplete, or is not a line of metrics, is cut with everything after it.
    """
    file.seek(0, os.SEEK_END)
    place = file.tell()
    end: int | None = None  # of the line whose beginning is searched
    tail = b""
    while place > 0:
        size = min(_BLOCK, place)
        place -= size
        file.seek(place)
        tail = file.read(size) + tail
        while True:
            if end is None:  # there is no line after the last newline
                newline = tail.rfind(b"\n")
                if newline < 0:
                    tail = b""
                    break
                end = place + newline + 1
                tail = tail[: newline + 1]
            start = tail.rfind(b"\n", 0, len(tail) - 1)
            if start < 0 and place > 0:
                break  # it begins in the previous block
            if _own_step(tail[start + 1 :]) <= step:
                return end
            if start < 0:
                return 0
            tail = tail[: start + 1]
            end = place + start + 1
    return 0


def _step(line: bytes, needs: str = "step") -> float:
    """Return the step of a line; infinity for one that is incomplete or lacks the key `needs`."""
    try:
        found = json.loads(line)
        return int(found["step"]) if needs in found else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _own_step(line: bytes) -> float:
    """Return the step of a line of rank 0."""
    return _step(line) if math.isinf(_step(line, "rank")) else math.inf
