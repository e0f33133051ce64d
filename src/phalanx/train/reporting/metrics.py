"""The metrics of a training: `metrics.jsonl`, one line per committed step and per call of `run.log`, and TensorBoard's
files in `tensorboard/`.

{"step": 120, "epoch": 1, "time": 1731650000.123, "loss": 0.3021}
{"step": 120, "epoch": 1, "time": 1731650001.456, "accuracy": 0.91}
{"step": 120, "epoch": 1, "time": 1731650001.789, "rank": 3, "temperature": 71.0}

A resumed run removes the lines after the step that it resumes from, so that every step is there once. What the script
logs again for that step, because it repeats the end of an epoch, is there once too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, BinaryIO, Literal

import torch

from phalanx.errors import UsageError
from phalanx.train.reporting.non_finite import NonFiniteWatch
from phalanx.train.reporting.tensorboard import TensorBoardWriter
from phalanx.train.reporting.trackers import Outcome, Tracker, TrackerGroup

NAME = "metrics.jsonl"
PREVIOUS = "metrics.{}.jsonl"  # of earlier trainings in this folder
FLUSH_EVERY = 1.0  # seconds that a step's values on a GPU, TensorBoard's files and trackers may wait
LOG_FLUSH_EVERY = 0.1  # the same for values of `run.log` while values on a GPU wait
MOST = 1000  # lines that wait to be written
Ending = Outcome | Literal["left"]  # left: the group has lost a rank, and the training continues in a new one
OURS = frozenset(("step", "epoch", "time", "rank"))
_BLOCK = 1 << 16
_TAIL = 1 << 20  # bytes of the file that are compared with values of other ranks, which arrive some seconds later


class WriteBudget:
    """Limits how often something small is written or sent: `burst` times at once, then `rate` times per second."""

    def __init__(self, *, burst: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._rate = rate
        self._clock = clock
        self._left = burst
        self._since = clock()

    def allows(self) -> bool:
        """Return whether to write now, and count that."""
        now = self._clock()
        self._left = min(self._left + (now - self._since) * self._rate, self._burst)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Metrics:
    """Writes metrics: `metrics = Metrics(folder, resumed_at=step)` on rank 0, then `write` every step, and `close`.

    Numbers are written at once, so that the end of the process does not lose them. Values on a GPU are collected and
    read together once per second, not in the step of the training. Later lines wait for them, because the file is in
    the order of steps. Trackers get all metrics of a second together. A full disk ends the metrics with a message, but
    not the training.
    """

    def __init__(
        self,
        folder: str,
        *,
        resumed_at: int = 0,
        tensorboard: bool = True,
        trackers: Sequence[Tracker] = (),
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = os.path.join(folder, NAME)
        self._say = say if say is not None else _say
        self._waiting: list[tuple[int, int, float, int, Mapping[str, Any]]] = []
        self._trackers: TrackerGroup | None = None
        self._resumed_at = resumed_at
        # names in the lines of the step from which the run resumes
        self._repeated: Counter[tuple[str, ...]] = Counter()
        self._logged_before: set[tuple[int, str]] | None = None  # of rank 0: steps and values, once they are read
        self._non_finite = NonFiniteWatch()
        self._reported: set[int] = set()  # steps whose non-finite loss was already reported to the user
        self._clock = clock
        self._budget = WriteBudget(burst=50, rate=100, clock=clock)
        self._on_gpu = False  # a waiting value is on a GPU
        self._read_at = clock()  # last time when no value on a GPU was waiting
        self._due = clock() + FLUSH_EVERY
        self._file: BinaryIO | None = None
        self._board: TensorBoardWriter | None = None
        with self._or_none():
            os.makedirs(folder, exist_ok=True)
            self._repeated = _prepare(self.path, resumed_at)
            self._file = open(self.path, "ab")  # noqa: SIM115
            if tensorboard:
                self._board = TensorBoardWriter(os.path.join(folder, "tensorboard"), resumed_at + 1)
            if trackers:
                self._trackers = TrackerGroup(trackers, folder, resumed=resumed_at > 0, say=self._say)

    def log(
        self,
        step: int,
        epoch: int,
        when: float,
        values: Mapping[str, Any],
        *,
        rank: int = 0,
        earlier: bool = False,
    ) -> None:
        """Add logged values, as returned by `held`, unless the previous training has already logged them.

        `earlier`: they were logged before the group formed again, so the script may log them again for the same step.
        """
        names = (*(("rank",) if rank else ()), *values)
        if step == self._resumed_at and earlier:
            self._repeated[names] += 1
        elif step == self._resumed_at and self._repeated[names]:
            self._repeated[names] -= 1
            return
        if self._file is not None:
            self._add((step, epoch, when, rank, values))
            if self._on_gpu and self._clock() - self._read_at >= LOG_FLUSH_EVERY:
                self._write_lines()

    def has_logged(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether rank 0 had logged these values before this training resumed, not long ago."""
        if self._logged_before is None:
            self._logged_before = _logged(self.path, self._resumed_at)
        return (step, repr(dict(values))) in self._logged_before

    def write(self, step: int, epoch: int, values: Mapping[str, Any], *, reported: bool = False) -> bool:
        """Add the values of a committed step, as returned by `held`; return whether a GPU was just synchronised.

        `reported`: a loss among them is not finite, and that was already reported.
        """
        if self._file is None:
            return False
        if reported:
            self._reported.add(step)
        self._add((step, epoch, time.time(), 0, values))
        if len(self._waiting) < MOST and self._clock() < self._due:
            return False
        self.flush()
        return True

    def _add(self, line: tuple[int, int, float, int, Mapping[str, Any]]) -> None:
        self._waiting.append(line)
        self._on_gpu = self._on_gpu or any(isinstance(value, torch.Tensor) for value in line[-1].values())
        if not self._on_gpu and self._budget.allows():
            self._write_lines()

    def flush(self) -> None:
        """Write all lines so far. Without fsync: a power cut may lose the last ones."""
        self._due = self._clock() + FLUSH_EVERY
        self._write_lines()
        if self._trackers is not None:
            self._trackers.flush()

    def _write_lines(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._on_gpu, self._read_at = False, self._clock()
        if self._file is None or not waiting:
            return
        rows = read(values for *_, values in waiting)
        for (step, _, _, rank, _), row in zip(waiting, rows, strict=True):
            for line in self._non_finite.look(step, row) if not rank and step not in self._reported else ():
                self._say(line)
        self._reported.clear()
        lines = [
            encode(step, epoch, when, row, rank)
            for (step, epoch, when, rank, _), row in zip(waiting, rows, strict=True)
        ]
        with self._or_none():
            self._file.write("".join(lines).encode())
            self._file.flush()
            if self._board is None and self._trackers is None:
                return
            for (step, _, when, rank, _), row in zip(waiting, rows, strict=True):
                named = {f"{name}/rank {rank}": value for name, value in row.items()} if rank else row
                if self._board is not None:
                    self._board.write(step, when, named)
                if self._trackers is not None:
                    self._trackers.write(step, named)
            if self._board is not None:
                self._board.flush()

    def close(self, ending: Ending = "done") -> None:
        """Write all lines and close the files. End the runs of trackers, unless the training continues ("left")."""
        try:
            self.flush()
        finally:
            self._end()
            if self._trackers is not None and ending != "left":
                self._trackers.close(ending)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close("failed" if error is not None else "done")

    @contextlib.contextmanager
    def _or_none(self) -> Any:
        try:
            yield
        except OSError as error:
            self._end()
            self._say(f"metrics are no longer written: {error}")

    def _end(self) -> None:
        for file in (self._file, self._board):
            if file is not None:
                with contextlib.suppress(OSError):  # closing writes what is still in the buffer
                    file.close()
        self._file = self._board = None


def _say(text: str) -> None:
    sys.stderr.write(f"phalanx: {text}\n")


# -- values


def held(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current values, to be read later: a training may change a tensor in place.

    A value on the CPU becomes a number; one on a GPU is copied on the GPU, without waiting for it.
    """
    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            found[name] = _number(name, value) if value.is_cpu or value.numel() != 1 else value.detach().clone()
        else:
            found[name] = value if type(value) is float else _number(name, value)
    if not OURS.isdisjoint(found):
        name = min(OURS & found.keys())
        raise UsageError(f'a metric cannot be named "{name}": every line has that key already', fix=f"my_{name}=…")
    return found


def read(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return held values as numbers. Those on a GPU are copied together, not one by one."""
    found: list[dict[str, float]] = [dict(row) for row in rows]
    far: dict[Any, list[tuple[dict[str, float], str, torch.Tensor]]] = {}
    for row in found:
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                far.setdefault((value.device, value.dtype, value.shape), []).append((row, name, value))
    for places in far.values():
        numbers = torch.stack([value for _, _, value in places]).flatten().tolist()
        for (row, name, _), number in zip(places, numbers, strict=True):
            row[name] = float(number)
    return found


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach().item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        seen = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        fix = f"{name}={name}.mean()" if hasattr(value, "mean") else f"{name}=0.5, or run.print(…) for text"
        raise UsageError(f"the metric {name} is {seen}, not one number", fix=fix) from None


# -- the file


def encode(step: int, epoch: int, when: float, values: Mapping[str, float], rank: int = 0) -> str:
    """Return one line. JSON has no infinity and NaN: these are strings that float() accepts."""
    parts = [f'{{"step": {step}, "epoch": {epoch}, "time": {when:.6f}', *([f'"rank": {rank}'] if rank else [])]
    for name, value in values.items():
        parts.append(f"{_quoted(name)}: {value!r}" if math.isfinite(value) else f'{_quoted(name)}: "{value!r}"')
    return ", ".join(parts) + "}\n"


@cache
def _quoted(name: str) -> str:
    return json.dumps(name)


def _prepare(path: str, resumed_at: int) -> Counter[tuple[str, ...]]:
    """Cut the file for a resumed training, and return the names in the lines of the step from which it resumes. For a
    new training, rename the file of the previous one.
    """
    with contextlib.suppress(FileNotFoundError):
        if resumed_at == 0:
            if os.path.getsize(path):
                os.replace(path, _free(os.path.dirname(path)))
        else:
            with open(path, "r+b") as file:
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
    with contextlib.suppress(OSError), open(path, "rb") as file:
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
