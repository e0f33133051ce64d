"""The metrics of a training: `metrics.jsonl`, one line per committed step, and TensorBoard's files in `tensorboard/`.

{"step": 120, "epoch": 1, "time": 1731650000.123, "loss": 0.3021, "accuracy": 0.91}

A resumed run removes the lines after the step that it resumes from, so that every step is there once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, BinaryIO

import torch

from phalanx.errors import UsageError
from phalanx.train.reporting.tensorboard import TensorBoardWriter

NAME = "metrics.jsonl"
PREVIOUS = "metrics.{}.jsonl"  # of earlier trainings in this folder
FLUSH_EVERY = 1.0
MOST = 1000  # lines that wait to be written
OURS = frozenset(("step", "epoch", "time"))
_BLOCK = 1 << 16


class Metrics:
    """Writes metrics: `metrics = Metrics(folder, resumed_at=step)` on rank 0, then `write` every step, and `close`.

    Lines are collected and written every second. Values on a GPU are read then, all at once, and not in the step of the
    training. A full disk ends the metrics with a message, but not the training.
    """

    def __init__(
        self,
        folder: str,
        *,
        resumed_at: int = 0,
        tensorboard: bool = True,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = os.path.join(folder, NAME)
        self._say = say if say is not None else _say
        self._waiting: list[tuple[int, int, float, Mapping[str, Any]]] = []
        self._clock = clock
        self._due = clock() + FLUSH_EVERY
        self._file: BinaryIO | None = None
        self._board: TensorBoardWriter | None = None
        with self._or_none():
            os.makedirs(folder, exist_ok=True)
            _prepare(self.path, resumed_at)
            self._file = open(self.path, "ab")  # noqa: SIM115
            if tensorboard:
                self._board = TensorBoardWriter(os.path.join(folder, "tensorboard"), resumed_at + 1)

    def write(self, step: int, epoch: int, values: Mapping[str, Any]) -> bool:
        """Add the values of a committed step, as `held` returned them; return whether a GPU was just synchronised."""
        if self._file is None:
            return False
        self._waiting.append((step, epoch, time.time(), values))
        if len(self._waiting) < MOST and self._clock() < self._due:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write all lines so far. Without fsync: a power cut may lose the last ones."""
        waiting, self._waiting = self._waiting, []
        self._due = self._clock() + FLUSH_EVERY
        if self._file is None or not waiting:
            return
        rows = read(values for *_, values in waiting)
        lines = [encode(step, epoch, when, row) for (step, epoch, when, _), row in zip(waiting, rows, strict=True)]
        with self._or_none():
            self._file.write("".join(lines).encode())
            self._file.flush()
            if self._board is not None:
                for (step, _, when, _), row in zip(waiting, rows, strict=True):
                    self._board.write(step, when, row)
                self._board.flush()

    def close(self) -> None:
        """Write all lines and close the files."""
        try:
            self.flush()
        finally:
            self._end()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
    """Return the values as they are now, to be read later: a training may change a tensor in place.

    A value on the CPU becomes a number, one on a GPU is copied there: nothing waits for the GPU.
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
        raise UsageError(
            f"the metric {name} is {seen}, not one number", fix=f"run.step(opt, {name}={name}.mean())"
        ) from None


# -- the file


def encode(step: int, epoch: int, when: float, values: Mapping[str, float]) -> str:
    """Return one line. JSON has no infinity and NaN: these are strings that float() reads."""
    parts = [f'{{"step": {step}, "epoch": {epoch}, "time": {when:.6f}']
    for name, value in values.items():
        parts.append(f"{_quoted(name)}: {value!r}" if math.isfinite(value) else f'{_quoted(name)}: "{value!r}"')
    return ", ".join(parts) + "}\n"


@cache
def _quoted(name: str) -> str:
    return json.dumps(name)


def _prepare(path: str, resumed_at: int) -> None:
    """Cut the file for a resumed training; for a new one, rename the file of the training before."""
    with contextlib.suppress(FileNotFoundError):
        if resumed_at == 0:
            if os.path.getsize(path):
                os.replace(path, _free(os.path.dirname(path)))
        else:
            with open(path, "r+b") as file:
                file.truncate(cut(file, resumed_at))


def _free(folder: str) -> str:
    """Return a name that no earlier training has used."""
    number = 1
    while os.path.exists(path := os.path.join(folder, PREVIOUS.format(number))):
        number += 1
    return path


def cut(file: BinaryIO, step: int) -> int:
    """Return where the lines up to `step` end. Reads from the end, because usually little is cut.

    A line that is incomplete, or is not a line of metrics, is cut with all that follow it.
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
            if end is None:  # after the last newline is no line
                newline = tail.rfind(b"\n")
                if newline < 0:
                    tail = b""
                    break
                end = place + newline + 1
                tail = tail[: newline + 1]
            start = tail.rfind(b"\n", 0, len(tail) - 1)
            if start < 0 and place > 0:
                break  # it begins in the block before
            if _step(tail[start + 1 :]) <= step:
                return end
            if start < 0:
                return 0
            tail = tail[: start + 1]
            end = place + start + 1
    return 0


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
