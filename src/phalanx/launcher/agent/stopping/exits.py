"""Workers whose script is over and whose process has not exited: reports what each waits for, and ends those that hang.

A process may take long to exit: Python waits for its threads, then calls its atexit functions, which may wait for child
processes. Such a process is reported once and not ended. One that is already in the teardown of the interpreter, and
uses no CPU there, never exits by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.diagnose import frames
from phalanx.diagnose.evidence import Frame, Rank
from phalanx.forkserver import linux
from phalanx.launcher.agent.stopping import linger
from phalanx.launcher.hangs import node_evidence
from phalanx.launcher.telemetry import process_stats

if TYPE_CHECKING:
    from phalanx.launcher.telemetry.node_sampler import NodeReading, WorkerReading
    from phalanx.launcher.telemetry.process_stats import ProcessStatsReader
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.worker_group import WorkerGroup

NAMED = 8.0  # seconds after its last line; the report follows within 10
LIMIT = 10.0  # seconds in the teardown of the interpreter
IDLE = 8.0  # seconds without CPU time, at least
_MOST = 3  # threads or processes in a report


@dataclass(frozen=True)
class Exit:
    """A process whose script is over. Times are seconds."""

    over: float  # since its last line
    teardown: float = 0.0  # since its last atexit function returned; 0: it has not
    idle: float = 0.0  # without CPU time
    children: bool = False  # it has child processes that it may wait for


def decide(seen: Exit, *, named: bool) -> Literal["wait", "name", "end"]:
    """Return the action for a process whose script is over."""
    if seen.teardown >= LIMIT and seen.idle >= IDLE and not seen.children:
        return "end"
    return "name" if seen.over >= NAMED and not named else "wait"


class Exits:
    """Watches the workers of this node whose script is over, as a consumer of the node sampler."""

    section = "exits"  # nothing is sent to the leader

    def __init__(self, note: Callable[[str], None], stats: ProcessStatsReader) -> None:
        self._note = note
        self._stats = stats
        self._named: set[int] = set()
        self._cpu: dict[int, tuple[float, float]] = {}  # pid -> seconds of CPU, and when they were last seen to grow
        self._task: asyncio.Task[None] | None = None

    def observe(self, reading: NodeReading) -> None:
        """Check the workers whose script is over, unless the previous check still runs."""
        attempt = reading.attempt
        if attempt.stopping or reading.last or (self._task is not None and not self._task.done()):
            return
        over = [
            each
            for each in reading.workers
            if each.worker.code is None
            and each.status is not None
            and "over" in each.status.text
            and each.worker.seat.rank not in attempt.workers.debugged
        ]
        if over:
            self._task = asyncio.get_running_loop().create_task(self._check(attempt, over))

    def receive(self, member: int, content: bytes) -> None:
        """Do nothing: every node watches its own workers."""

    async def end(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check(self, attempt: WorkerGroup, over: list[WorkerReading]) -> None:
        for each in over:
            if each.status is not None and each.worker.code is None:
                with contextlib.suppress(OSError, ValueError, KeyError):  # it exits meanwhile
                    await self._look(attempt, each.name, each.worker, each.status.text)

    async def _look(self, attempt: WorkerGroup, name: str, worker: Worker, text: dict[str, Any]) -> None:
        now, pid = time.monotonic(), worker.pid
        teardown = now - text["teardown"] if "teardown" in text else 0.0
        seen = Exit(now - text["over"], teardown, self._idle(pid, now))
        if decide(seen, named=True) == "end":
            seen = Exit(seen.over, seen.teardown, seen.idle, children=bool(await asyncio.to_thread(_children, pid)))
        match decide(seen, named=pid in self._named):
            case "name":
                self._named.add(pid)
                rank = await node_evidence.rank(attempt, name, worker, self._stats)
                if worker.code is None:
                    self._note(
                        f"rank {worker.seat.rank} ran its last line {seen.over:.0f} s ago and has not ended: "
                        f"{waits_for(rank, text)}"
                    )
                if pid in self._cpu:  # writing its stacks has used CPU time
                    self._cpu[pid] = (process_stats.cpu(pid), self._cpu[pid][1])
            case "end":
                code = int(text.get("code", 0))
                self._note(
                    f"rank {worker.seat.rank} has hung in the teardown of the interpreter for {seen.teardown:.0f} s "
                    f"without using the CPU: ended with SIGKILL; it counts as exit code {code}"
                )
                attempt.workers.end_as(name, code)

    def _idle(self, pid: int, now: float) -> float:
        """Return for how many seconds it has slept. If it is stopped, traced or waits for a device: 0."""
        cpu = process_stats.cpu(pid)
        before, since = self._cpu.get(pid, (-1.0, now))
        if cpu != before or linux.state(pid) != "sleeps":
            since = now
        self._cpu[pid] = (cpu, since)
        return now - since


def _children(pid: int) -> list[linger.Orphan]:
    """Return its child processes, without helpers that end after their parent."""
    return linger.find(linux.descendants(pid), ranks={}, run="")


def waits_for(rank: Rank, text: dict[str, Any]) -> str:
    """Describe what keeps a process alive whose script is over. `text`: of its status slot."""
    threads = [thread for thread in rank.threads if thread.name in text.get("threads", ())]
    main = frames.main_frames(rank)
    if threads:
        named = [f'"{thread.name}"{_at(thread.frames)}' for thread in threads[:_MOST]]
        more = [f"{len(threads) - _MOST} more"] if len(threads) > _MOST else []
        return f"it waits for its thread{'s' if len(threads) > 1 else ''} {_and([*named, *more])}"
    process = rank.process
    children = [child for child in process.children if " Z " not in child] if process is not None else []
    below = f"; its child processes: {', '.join(children[:_MOST])}" if children else ""
    if "teardown" in text:
        wait = f", in {process.wchan}" if process is not None and process.wchan else ""
        return f"it is in the teardown of the interpreter{_at(main) or wait}{below}"
    if main:
        return f"it is in its atexit function {main[-1].function}{_at(main)}{below}"
    return f"it is in its atexit functions{below}"


def _at(stack: tuple[Frame, ...]) -> str:
    """Return the innermost line of the user's code, else of any code."""
    frame = frames.own(stack) or next(iter(stack), None)
    return f" ({os.path.basename(frame.file)}:{frame.line} in {frame.function})" if frame is not None else ""


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
