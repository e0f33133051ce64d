"""A training under a launcher: its ranks report their progress through a pipe, and can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.common import processes
from benchmarks.common.processes import ProcessLostError
from benchmarks.recover.progress import (
    Kill,
    ProgressRecord,
    RecoveryTimes,
    cpu_seconds,
    parse,
    recovery_times,
    settled_group,
    step_times,
)

Found = TypeVar("Found")

START_TIMEOUT = 120.0  # seconds until all ranks train
RECOVERY_TIMEOUT = 60.0  # seconds


class TrainingRun:
    """A training that `command` starts. `folder` holds its pipe, its output and its checkpoint."""

    def __init__(
        self, command: Sequence[str], config: Mapping[str, Any], ranks: int, environ: Mapping[str, str], folder: str
    ) -> None:
        os.makedirs(folder, exist_ok=True)
        self.records: list[ProgressRecord] = []
        self._ranks = ranks
        self._folder = folder
        self._rest = b""
        pipe = os.path.join(folder, "progress")
        os.mkfifo(pipe)
        self._pipe = os.open(
            pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        )  # opened for writing too, so that it never reports an end of file
        self._turns: list[int] = []
        turns = config.get("turns")
        if turns:
            for rank in range(ranks):
                os.mkfifo(f"{turns}.{rank}")
                self._turns.append(os.open(f"{turns}.{rank}", os.O_RDWR | os.O_CLOEXEC))
        line = [*command, json.dumps({**config, "progress": pipe})]
        self._process = processes.start_logged(line, environ, folder)
        self._handle = os.pidfd_open(self._process.pid)

    def close(self) -> None:
        """Stop the training."""
        if self._process.poll() is None:
            processes.stop(self._process)
        for handle in (self._handle, self._pipe, *self._turns):
            os.close(handle)

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def until(self, found: Callable[[list[ProgressRecord]], Found | None], limit: float, what: str) -> Found:
        """Wait until `found` returns something for all records so far, and return that."""
        end = time.monotonic() + limit
        while (answer := found(self.records)) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise ProcessLostError(
                    f"{what}: not within {limit:.0f} s; its output: {processes.last_output(self._folder)}"
                )
            self._wait(left)
        return answer

    def watch(self, seconds: float) -> None:
        """Read records for `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float) -> None:
        """Wait until a rank reports something, or for `seconds`."""
        ready, _, _ = select.select([self._pipe, self._handle], [], [], seconds)
        if self._pipe in ready:
            self._read()
        elif self._handle in ready:
            code, output = self._process.wait(), processes.last_output(self._folder)
            raise ProcessLostError(f"the launcher ended with code {code}; its output: {output}")

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._pipe, 1 << 16)
        whole, _, self._rest = self._rest.rpartition(b"\n")
        self.records += parse(whole.decode())

    def settle(self, steps: int, limit: float = START_TIMEOUT) -> int:
        """Wait until all ranks have committed `steps` steps in one group; return it, and drop older records."""
        group = self.until(lambda records: settled_group(records, self._ranks, steps), limit, "all ranks train")
        self.records = [record for record in self.records if record.group == group]
        return group

    def gather(self) -> None:
        """Wait until all ranks are ready to train; for a training that waits for `turn`."""
        self.until(
            lambda records: True if sum(record.what == "ready" for record in records) >= self._ranks else None,
            START_TIMEOUT,
            "all ranks are ready",
        )

    def turn(self, steps: int) -> tuple[float, float]:
        """Let a waiting training do `steps` steps; return the seconds until the last rank had, and the CPU seconds."""
        before = {record.rank: record.cpu for record in self.records}
        self.records.clear()
        begin = time.monotonic()
        for handle in self._turns:
            os.write(handle, b"." * steps)
        self.until(lambda records: True if len(records) >= steps * self._ranks else None, RECOVERY_TIMEOUT, "a turn")
        return max(record.time for record in self.records) - begin, cpu_seconds(self.records, before)

    def kill(self, group: int, rng: random.Random, phase: float = 0.0) -> Kill:
        """Send SIGKILL to a random rank at a random moment of the next `phase` seconds."""
        self.watch(rng.uniform(0.0, phase))
        rank = rng.randrange(self._ranks)
        pid = next(record.pid for record in reversed(self.records) if record.rank == rank)
        now = time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise ProcessLostError(
                f"rank {rank} had ended before it was killed; its output: {processes.last_output(self._folder)}"
            ) from None
        return Kill(rank, pid, group, now)

    def recovered(self, kill: Kill) -> RecoveryTimes:
        """Wait until the training continues after a kill."""
        return self.until(
            lambda records: recovery_times(records, kill, self._ranks),
            RECOVERY_TIMEOUT,
            f"next step after the kill of rank {kill.rank}",
        )

    def step_times(self) -> list[float]:
        """Return the durations of undisturbed steps so far."""
        return step_times(self.records)
