"""A training under a launcher, watched and disturbed from outside: its ranks tell how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from phalanx.bench import launch
from phalanx.bench.marks import Kill, Mark, Recovery, parsed, recovery, settled, spent, step_times

Found = TypeVar("Found")

START = 120.0  # seconds until all ranks train
LIMIT = 60.0  # for a recovery


class LostError(Exception):
    """The training does not go on, and why."""


class Training:
    """`folder` is its own: for the pipe of its marks, its output and its checkpoint."""

    def __init__(
        self, line: Sequence[str], told: Mapping[str, Any], ranks: int, environ: Mapping[str, str], folder: str
    ) -> None:
        os.makedirs(folder, exist_ok=True)
        self.marks: list[Mark] = []
        self._ranks = ranks
        self._folder = folder
        self._rest = b""
        pipe = os.path.join(folder, "marks")
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # also to write: it never ends
        self._turns: list[int] = []
        turns = told.get("turns")
        if turns:
            for rank in range(ranks):
                os.mkfifo(f"{turns}.{rank}")
                self._turns.append(os.open(f"{turns}.{rank}", os.O_RDWR | os.O_CLOEXEC))
        with open(os.path.join(folder, launch.OUTPUT), "wb") as output:
            self._process = subprocess.Popen(
                [*line, json.dumps({**told, "marks": pipe})],
                env=environ,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._handle = os.pidfd_open(self._process.pid)

    def close(self) -> None:
        if self._process.poll() is None:
            launch.stop(self._process)
        for handle in (self._handle, self._pipe, *self._turns):
            os.close(handle)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- to watch

    def until(self, found: Callable[[list[Mark]], Found | None], limit: float, what: str) -> Found:
        end = time.monotonic() + limit
        while (answer := found(self.marks)) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise LostError(f"{what}: not after {limit:.0f} s; it said: {launch.said(self._folder)}")
            self._look(left)
        return answer

    def watch(self, seconds: float) -> None:
        """And do nothing."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._look(left)

    def _look(self, seconds: float) -> None:
        """Until something is told, or the time is over."""
        ready, _, _ = select.select([self._pipe, self._handle], [], [], seconds)
        if self._pipe in ready:
            self._read()
        elif self._handle in ready:
            raise LostError(f"it has ended with code {self._process.wait()}; it said: {launch.said(self._folder)}")

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._pipe, 1 << 16)
        whole, _, self._rest = self._rest.rpartition(b"\n")
        self.marks += parsed(whole.decode())

    def settle(self, steps: int, limit: float = START) -> int:
        """Until all ranks have done so many steps together; their group. What was before is forgotten."""
        group = self.until(lambda marks: settled(marks, self._ranks, steps), limit, "all ranks train")
        self.marks = [mark for mark in self.marks if mark.group == group]
        return group

    def gather(self) -> None:
        """Until all ranks are ready to train; for one that waits for its turns."""
        self.until(
            lambda marks: True if sum(mark.what == "ready" for mark in marks) >= self._ranks else None,
            START,
            "it starts",
        )

    # -- to disturb

    def turn(self, steps: int) -> tuple[float, float]:
        """Let it do so many steps, where it waits for that: seconds until the last rank had, and of all ranks' CPUs."""
        before = {mark.rank: mark.cpu for mark in self.marks}
        self.marks.clear()
        begin = time.monotonic()
        for handle in self._turns:
            os.write(handle, b"." * steps)
        self.until(lambda marks: True if len(marks) >= steps * self._ranks else None, LIMIT, "a turn")
        return max(mark.time for mark in self.marks) - begin, spent(self.marks, before)

    def kill(self, group: int, chance: random.Random, phase: float = 0.0) -> Kill:
        """SIGKILL to a rank, up to `phase` seconds from now."""
        self.watch(chance.uniform(0.0, phase))
        rank = chance.randrange(self._ranks)
        pid = next(mark.pid for mark in reversed(self.marks) if mark.rank == rank)
        now = time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise LostError(
                f"rank {rank} was gone before it was killed; it said: {launch.said(self._folder)}"
            ) from None
        return Kill(rank, pid, group, now)

    def recovered(self, kill: Kill) -> Recovery:
        return self.until(lambda marks: recovery(marks, kill, self._ranks), LIMIT, f"rank {kill.rank} was killed")

    def step_times(self) -> list[float]:
        return step_times(self.marks)
