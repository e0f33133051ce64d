"""Where the main thread is: its phase, its place in the user's code, and what it waits for."""

from __future__ import annotations

import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

from . import page, recorder

_HERE = __name__.rpartition(".")[0]


class Sampler:
    def __init__(self, own: page.Page) -> None:
        self._page = own
        self._main = threading.main_thread().ident
        self._looks = 0
        self._moves = 0
        self._phases = [0] * len(page.PHASES)
        self._before: tuple[CodeType, int] | None = None
        self._moved = 0

    @property
    def still(self) -> float:
        """Seconds that the main thread has been where it is."""
        return max(0.0, (time.monotonic_ns() - self._moved) / 1e9) if self._moved else 0.0

    def publish(self, now: int) -> None:
        frame = sys._current_frames().get(self._main or 0)
        groups = recorder.groups()
        phase, place = look(frame)
        waiting = any(group["enqueued"] > group["completed"] for group in groups)
        if waiting and phase == "backward":
            phase = "collective"
        self._looks += 1
        self._phases[page.PHASES.index(phase)] += 1
        if frame is not None:
            here = (frame.f_code, frame.f_lasti)
            if here != self._before:
                self._moves += 1
                self._moved = now
            self._before = here
        self._page.look(now, self._looks, self._moves, self._phases)
        self._page.write({"phase": phase, "place": place, "groups": groups})


def look(frame: FrameType | None) -> tuple[str, list[Any]]:
    """Phase and place: file, line, function."""
    phase = "idle"
    place: list[Any] = []
    while frame is not None:
        code = frame.f_code
        if not place and "site-packages" not in code.co_filename:
            place = [code.co_filename, frame.f_lineno, code.co_name]
        if phase == "idle":
            phase = _phase(code)
        frame = frame.f_back
    return phase, place


def _phase(code: CodeType) -> str:
    name = code.co_filename
    if "torch/distributed/distributed_c10d.py" in name:
        return "join" if code.co_name == "init_process_group" else "collective"
    if "torch/utils/data/" in name:
        return "data"
    if "torch/optim/" in name:
        return "optimizer"
    if "torch/autograd/" in name:
        return "backward"
    if "torch/nn/modules/module.py" in name:
        return "forward"
    if "torch/_dynamo/" in name or "torch/_inductor/" in name:
        return "compile"
    if "torch/serialization.py" in name:
        return "checkpoint"
    if name.startswith("<frozen importlib"):
        return "import"
    return "idle"
