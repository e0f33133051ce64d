"""What a training measured: `metrics.jsonl`, a committed step a line, and TensorBoard's files where it is installed.

{"step": 120, "epoch": 1, "time": 1731650000.123, "loss": 0.3021, "accuracy": 0.91}

A resumed run cuts off what is after the step that it resumes from, so that every step is there once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

NAME = "metrics.jsonl"
PREVIOUS = "metrics.previous.jsonl"
FLUSH_EVERY = 2.0
_BLOCK = 1 << 16


class Metrics:
    """`metrics = Metrics(folder, resumed_at=run_was_at)` on rank 0, then `write` a step, and `close`.

    Lines wait in memory and are written every two seconds: a value that is a tensor on a GPU is waited for then, and
    not in the training's step. `tensorboard`: None if it is installed, True to be told (`note`) that it is not.
    """

    def __init__(
        self,
        folder: str,
        *,
        resumed_at: int = 0,
        tensorboard: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, NAME)
        self.note = ""
        _prepare(self.path, resumed_at)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._waiting: list[tuple[int, int, float, dict[str, Any]]] = []
        self._clock = clock
        self._due = clock() + FLUSH_EVERY
        self._board = self._open_board(folder, resumed_at) if tensorboard is not False else None
        if tensorboard and self._board is None:
            self.note = "TensorBoard's files are not written: it is not installed; pip install 'phalanx[tensorboard]'"

    def write(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Of a committed step: numbers, or tensors of one element."""
        self._waiting.append((step, epoch, time.time(), {name: _held(value) for name, value in values.items()}))
        if self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        """What was written so far can be read by others. Not fsynced: a power cut may take the last lines."""
        waiting, self._waiting = self._waiting, []
        for step, epoch, when, values in waiting:
            numbers = {name: float(value) for name, value in values.items()}
            self._file.write(encode(step, epoch, when, numbers))
            if self._board is not None:
                for name, number in numbers.items():
                    self._board.add_scalar(name, number, step, walltime=when)
        self._file.flush()
        if self._board is not None and waiting:
            self._board.flush()
        self._due = self._clock() + FLUSH_EVERY

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()
            if self._board is not None:
                self._board.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_board(self, folder: str, resumed_at: int) -> Any:
        if importlib.util.find_spec("tensorboard") is None:
            return None
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier process wrote for later steps is not shown.
        return SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)


def encode(step: int, epoch: int, when: float, values: Mapping[str, float]) -> str:
    """One line. JSON has no word for what is not a finite number, so that is text, which float() reads."""
    record: dict[str, Any] = {"step": step, "epoch": epoch, "time": round(when, 6)}
    for name, value in values.items():
        record[name] = value if math.isfinite(value) else str(value)
    return json.dumps(record) + "\n"


def _held(value: Any) -> Any:
    """As it is now: a training may change a tensor in place before the line is written."""
    if isinstance(value, (int, float)):
        return value
    if hasattr(value, "detach"):
        value = value.detach()
        if value.device.type != "cpu":
            return value.clone()
    return float(value)


def _prepare(path: str, resumed_at: int) -> None:
    """A training that begins anew keeps the file of the one before beside its own."""
    with contextlib.suppress(FileNotFoundError):
        if resumed_at == 0:
            if os.path.getsize(path):
                os.replace(path, os.path.join(os.path.dirname(path), PREVIOUS))
        else:
            with open(path, "r+b") as file:
                file.truncate(cut(file, resumed_at))


def cut(file: BinaryIO, step: int) -> int:
    """Where the lines end that are not after `step`. Read from the end, because little is to be cut from much.

    A line that was half written, or is none of ours, is cut off with what follows it.
    """
    file.seek(0, os.SEEK_END)
    place = file.tell()
    end: int | None = None  # of the line that we look for the beginning of
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
