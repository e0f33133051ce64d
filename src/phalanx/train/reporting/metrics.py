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
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, BinaryIO, Literal, NamedTuple

import torch

from phalanx.contract.regular_file import open_regular
from phalanx.errors import CheckpointError, UsageError
from phalanx.train.reporting.earlier_lines import OURS, EarlierLines
from phalanx.train.reporting.non_finite import NonFiniteWatch
from phalanx.train.reporting.tensorboard import TensorBoardWriter
from phalanx.train.reporting.trackers import Outcome, Tracker, TrackerGroup

NAME = "metrics.jsonl"
FLUSH_EVERY = 1.0  # seconds that a step's values on a GPU, TensorBoard's files and trackers may wait
LOG_FLUSH_EVERY = 0.1  # the same for values of `run.log` while values on a GPU wait
PAUSE = 0.5  # seconds after which lines that wait are written, if no other line follows
MOST = 1000  # lines that wait to be written
Ending = Outcome | Literal["left"]  # left: the group has lost a rank, and the training continues in a new one


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


class PauseThread:
    """Calls `write` PAUSE seconds after a request, in a thread that starts with the first one."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._requested = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Request a call, unless one is requested already."""
        if self._requested.is_set():
            return
        self._requested.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._closed.set()
        self._requested.set()

    def _run(self) -> None:
        while self._requested.wait() and not self._closed.wait(PAUSE):
            self._requested.clear()
            self._write()


class MetricsLine(NamedTuple):
    """A line of the file: the values of a committed step, or of one call of `run.log`."""

    step: int
    epoch: int
    time: float
    rank: int
    values: Mapping[str, Any]  # as returned by `held`


@dataclass
class WaitingLines:
    """Lines that TensorBoard and trackers do not have yet."""

    lines: list[MetricsLine] = field(default_factory=list)
    in_file: int = 0  # how many of them are in the file already
    on_gpu: bool = False  # one of their values is on a GPU


class Metrics:
    """Writes metrics: `metrics = Metrics(folder, resumed_at=step)` on rank 0, then `write` every step, and `close`.

    Numbers are written at once, so that the end of the process does not lose them; lines that come faster than 100 per
    second are written up to 10 ms later, or by a thread if none follows. Values on a GPU are collected and read
    together once per second, not in the step of the training. Later lines wait for them, because the file is in the
    order of steps. Trackers get all metrics of a second together. A full disk, or a link in the place of the file, ends
    the metrics with a message, but not the training.
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
        self._lock = threading.RLock()  # of the file and the lines that wait
        self._waiting = WaitingLines()
        self._pause = PauseThread(self._write_file)
        self._trackers: TrackerGroup | None = None
        self._earlier = EarlierLines(self.path, resumed_at)
        self._non_finite = NonFiniteWatch()
        self._reported: set[int] = set()  # steps whose non-finite loss was already reported to the user
        self._clock = clock
        self._budget = WriteBudget(burst=50, rate=100, clock=clock)
        self._read_at = clock()  # last time when no value on a GPU was waiting
        self._due = clock() + FLUSH_EVERY
        self._file: BinaryIO | None = None
        self._board: TensorBoardWriter | None = None
        try:
            os.makedirs(folder, exist_ok=True)
            self._earlier.prepare()
            self._file = open(self.path, "ab", opener=open_regular)  # noqa: SIM115
            if tensorboard:
                self._board = TensorBoardWriter(os.path.join(folder, "tensorboard"), resumed_at + 1)
            if trackers:
                self._trackers = TrackerGroup(trackers, folder, resumed=resumed_at > 0, say=self._say)
        except (OSError, CheckpointError) as error:
            self._give_up(error)

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
        if not self._earlier.has_line(step, names, expect_again=earlier) and self._file is not None:
            self._add(MetricsLine(step, epoch, when, rank, values))
            self.settle()

    def settle(self) -> None:
        """Write lines that wait for values on a GPU, unless that was done a moment ago."""
        if self._waiting.on_gpu and self._clock() - self._read_at >= LOG_FLUSH_EVERY:
            self._write_lines()

    def has_logged(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether rank 0 had logged these values before this training resumed, not long ago."""
        return self._earlier.has_values(step, values)

    def write(self, step: int, epoch: int, values: Mapping[str, Any], *, reported: bool = False) -> bool:
        """Add the values of a committed step, as returned by `held`; return whether a GPU was just synchronised.

        `reported`: a loss among them is not finite, and that was already reported.
        """
        if self._file is None:
            return False
        if reported:
            self._reported.add(step)
        self._add(MetricsLine(step, epoch, time.time(), 0, values))
        if len(self._waiting.lines) < MOST and self._clock() < self._due:
            return False
        self.flush()
        return True

    def _add(self, line: MetricsLine) -> None:
        with self._lock:
            self._waiting.lines.append(line)
            if not self._waiting.on_gpu:
                for value in line.values.values():
                    if isinstance(value, torch.Tensor):
                        self._waiting.on_gpu = True
                        return
                if self._budget.allows():
                    self._write_lines()
                else:
                    self._pause.request()

    def flush(self) -> None:
        """Write all lines so far. Without fsync: a power cut may lose the last ones."""
        self._due = self._clock() + FLUSH_EVERY
        self._write_lines()
        if self._trackers is not None:
            self._trackers.flush()

    def _write_lines(self) -> None:
        with self._lock:
            waiting, self._waiting, self._read_at = self._waiting, WaitingLines(), self._clock()
            lines = waiting.lines
            if self._file is None or not lines:
                return
            if waiting.on_gpu:
                rows = read(line.values for line in lines)
                lines = [line._replace(values=row) for line, row in zip(lines, rows, strict=True)]
            for step, _, _, rank, values in lines:
                for text in self._non_finite.look(step, values) if not rank and step not in self._reported else ():
                    self._say(text)
            self._reported.clear()
            try:
                self._file.write("".join([encode(*line) for line in lines[waiting.in_file :]]).encode())
                self._file.flush()
                if self._board is not None or self._trackers is not None:
                    self._pass_on(lines)
            except OSError as error:
                self._give_up(error)

    def _write_file(self) -> None:
        """Write waiting lines to the file, in the thread. All else, such as a function of the script that gets metrics,
        belongs to the thread of the training.
        """
        with self._lock:
            waiting = self._waiting
            if self._file is None or waiting.on_gpu or waiting.in_file == len(waiting.lines):
                return
            lines, waiting.in_file = waiting.lines[waiting.in_file :], len(waiting.lines)
            with contextlib.suppress(OSError):  # it stays in the buffer, and the next line reports the error
                self._file.write("".join([encode(*line) for line in lines]).encode())
                self._file.flush()

    def _pass_on(self, lines: Sequence[MetricsLine]) -> None:
        """Pass lines that are in the file to TensorBoard and trackers."""
        for step, _, when, rank, values in lines:
            named = {f"{name}/rank {rank}": value for name, value in values.items()} if rank else values
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

    def _give_up(self, error: Exception) -> None:
        self._end()
        self._say(f"metrics are no longer written: {error}")

    def _end(self) -> None:
        self._pause.close()
        with self._lock:
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


def encode(step: int, epoch: int, when: float, rank: int, values: Mapping[str, float]) -> str:
    """Return one line. JSON has no infinity and NaN: these are strings that float() accepts."""
    parts = [f'{{"step": {step}, "epoch": {epoch}, "time": {when:.6f}']
    if rank:
        parts.append(f'"rank": {rank}')
    for name, value in values.items():
        parts.append(f"{_quoted(name)}: {value!r}" if math.isfinite(value) else f'{_quoted(name)}: "{value!r}"')
    return ", ".join(parts) + "}\n"


@cache
def _quoted(name: str) -> str:
    return json.dumps(name)
