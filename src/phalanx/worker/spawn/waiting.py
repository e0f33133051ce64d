"""What the caller of `spawn` does until its ranks have ended: shows output, collects results, finds the first cause."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from phalanx.errors import LaunchError, RankError
from phalanx.forkserver import paths
from phalanx.worker.spawn import linux

# What a healthy rank says when another one has gone: a consequence, never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|sendBytes failed|remote process exited"
    r"|NCCL (remote|communicator was aborted)|Connection was likely closed|failed to connect|connectFullMesh failed"
    r"|pair closure"
    rf"|\b({'|'.join(paths.LOST_PEER)}): "  # of our own groups
)
_LAST_WORDS = 10.0  # for a keeper that was told to stop
_LINGER = 5.0  # for a rank that has failed, or has gone without a result, and does not end or end the others
_LONGEST = 1 << 16  # of a line, before what there is of it is shown


@dataclass(frozen=True)
class RankEnds:
    """The caller's ends of what is between it and the keeper."""

    control: int
    status: int
    pipes: tuple[tuple[int, int, int], ...]  # of each rank: stdout, stderr, what it returns


@dataclass
class _Rank:
    code: int | None = None
    time: float = 0.0
    stopped: bool = False  # was told to end before it did
    answer: bytearray = field(default_factory=bytearray)

    def told(self) -> dict[str, Any] | None:
        """What the rank itself said at its end; None: nothing, or half of it."""
        try:
            return dict(pickle.loads(self.answer)) if self.answer else None  # noqa: S301
        except Exception:
            return None


class SpawnWait:
    """Shows what ranks print, and collects what they return, until the keeper has ended."""

    def __init__(self, ends: RankEnds, pid: int, timeout: float | None) -> None:
        self._ends = ends
        self._world = len(ends.pipes)
        self._pid = pid
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._ranks = [_Rank() for _ in range(self._world)]
        self._status = bytearray()
        digits = len(str(self._world - 1))
        self._lines = {
            (rank, stream): _Lines(f"[{rank:>{digits}}] ") for rank in range(self._world) for stream in (0, 1)
        }
        self._stopped = False
        self._failing = False  # a rank has failed, and the rest are about to be ended
        self._late: list[int] = []

    def results(self) -> list[Any]:
        try:
            self._follow()
        finally:
            # Also on Ctrl-C: nobody is left behind, and then whatever it was goes on.
            self._end()
        return self._judge()

    def _follow(self) -> None:
        keeper_ended = os.pidfd_open(self._pid)
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(keeper_ended, selectors.EVENT_READ, None)
                for fd, what in self._sources():
                    ready.register(fd, selectors.EVENT_READ, what)
                ended = False
                while not ended:
                    wait = self._deadline - time.monotonic()
                    events = ready.select(None if wait == float("inf") else max(wait, 0.0))
                    if not events:
                        self._overdue()
                    for key, _ in events:
                        if key.data is None:
                            ended = True
                        elif not self._take(key.fd, key.data):
                            ready.unregister(key.fd)
        finally:
            os.close(keeper_ended)

    def _sources(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Descriptor -> (rank, 0 stdout, 1 stderr, 2 result); rank -1 is the keeper."""
        yield self._ends.status, (-1, 0)
        for rank, pipes in enumerate(self._ends.pipes):
            for stream, fd in enumerate(pipes):
                yield fd, (rank, stream)

    def _take(self, fd: int, what: tuple[int, int]) -> bool:
        """One read; whether there may be more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        self._store(data, what)
        rank, stream = what
        if stream == 2 and not data and self._failed_by_itself(rank):
            self._failing = True
            self._deadline = min(self._deadline, time.monotonic() + _LINGER)
        return bool(data)

    def _failed_by_itself(self, rank: int) -> bool:
        """Asked of a rank that will say nothing more."""
        return "error" in (self._ranks[rank].told() or {"error": "it said nothing"})

    def _overdue(self) -> None:
        if not self._failing:
            done = {int(json.loads(line).get("rank", -1)) for line in self._status.splitlines()}
            self._late = [rank for rank in range(len(self._ranks)) if rank not in done]
        self._deadline = float("inf")
        self._stop()

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(BrokenPipeError):
                os.write(self._ends.control, b"x")

    def _end(self) -> None:
        """The keeper's end, and what is left in the pipes."""
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                self._stop()
                self._wait_for_keeper()
        for fd, what in self._sources():
            with contextlib.suppress(OSError):
                while True:
                    data = os.read(fd, 1 << 16)
                    if not data:
                        break
                    self._store(data, what)
        for (_, stream), lines in self._lines.items():
            lines.finish(sys.stderr if stream else sys.stdout)

    def _store(self, data: bytes, what: tuple[int, int]) -> None:
        rank, stream = what
        if rank < 0:
            self._status += data
        elif stream == 2:
            self._ranks[rank].answer += data
        else:
            self._lines[what].show(data, sys.stderr if stream else sys.stdout)

    def _wait_for_keeper(self) -> None:
        ended = os.pidfd_open(self._pid)
        ready = selectors.DefaultSelector()
        try:
            ready.register(ended, selectors.EVENT_READ)
            if not ready.select(_LAST_WORDS):
                self._kill()
        except KeyboardInterrupt:  # pressed twice
            self._kill()
            raise
        finally:
            ready.close()
            os.close(ended)
            os.waitpid(self._pid, 0)

    def _kill(self) -> None:
        """The keeper at once. Its ranks die with it, but not what these had started."""
        below = linux.descendants(self._pid)
        os.kill(self._pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _judge(self) -> list[Any]:
        for line in self._status.splitlines():
            told = json.loads(line)
            if "broken" in told:
                raise LaunchError("the ranks could not be started", details=told["broken"].rstrip().splitlines())
            self._ranks[told["rank"]] = replace(
                self._ranks[told["rank"]], code=told["code"], time=told["time"], stopped=told["stopped"]
            )
        answers = [rank.told() for rank in self._ranks]
        if self._late:
            raise _too_late(self._late, len(self._ranks), self._timeout or 0.0)
        failures = [
            failure
            for rank, (state, answer) in enumerate(zip(self._ranks, answers, strict=True))
            if (failure := _failure(rank, state, answer)) is not None
        ]
        if failures:
            raise _error(failures, len(self._ranks))
        return [pickle.loads(answer["value"]) for answer in answers if answer]  # noqa: S301


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    time: float
    ours: bool = False  # the end that we made
    traceback: str = ""
    exception: bytes = b""
    fix: str = ""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The first cause first: what followed from another's end comes after whatever did not."""
        return self.ours, bool(_PEER_LOST.search(self.text)), self.time


def _failure(rank: int, state: _Rank, answer: dict[str, Any] | None) -> _Failure | None:
    if answer and "error" in answer:
        kept = {name: answer.get(name, empty) for name, empty in (("traceback", ""), ("exception", b""), ("fix", ""))}
        return _Failure(rank, answer["error"], answer["time"], **kept)
    if answer and (state.code == 0 or state.stopped):
        return None
    if state.code is None:
        return _Failure(rank, "its keeper was killed", time.time(), ours=True)
    if state.code < 0:
        return _Failure(rank, f"killed by {_signal(-state.code)}", state.time, ours=state.stopped)
    text = f"ended with exit code {state.code}" + ("" if answer else " and no result")
    return _Failure(rank, text, state.time, ours=state.stopped)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _error(failures: Sequence[_Failure], world: int) -> RankError:
    first, *others = sorted(failures, key=lambda failure: failure.order)
    error = RankError(
        f"rank {first.rank} of {world}: {first.text}",
        rank=first.rank,
        traceback=first.traceback,
        details=[f"afterwards rank {other.rank}: {other.text}" for other in others if not other.ours],
        fix=first.fix,
    )
    if first.exception:
        with contextlib.suppress(Exception):  # many exceptions can be pickled and not unpickled
            error.__cause__ = pickle.loads(first.exception)  # noqa: S301
    return error


def _too_late(late: list[int], world: int, timeout: float) -> LaunchError:
    names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
    return LaunchError(
        f"{names} of {world} had not ended after {timeout:g} s, and were stopped",
        fix="a longer timeout=…, or look what they wait for",
    )


class _Lines:
    """Whole lines, with the rank before each."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._rest = b""

    def show(self, data: bytes, stream: TextIO) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            stream.write("".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines))
            stream.flush()

    def finish(self, stream: TextIO) -> None:
        if self._rest:
            self.show(b"\n", stream)
