"""The caller of `spawn` waits for its ranks: shows output, collects results, and finds the first cause."""

from __future__ import annotations

import contextlib
import json
import logging
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

logger = logging.getLogger(__name__)

# Errors of a healthy rank when another one is gone: a consequence, never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|sendBytes failed|remote process exited"
    r"|NCCL (remote|communicator was aborted)|Connection was likely closed|failed to connect|connectFullMesh failed"
    r"|pair closure"
    rf"|\b({'|'.join(paths.LOST_PEER)}): "  # of phalanx's groups
)
_STOP_TIMEOUT = 10.0  # seconds for the keeper to stop
_LINGER = 5.0  # seconds for a rank that has failed, or has no result, to end
_LONGEST = 1 << 16  # bytes of a line, before a part of it is shown


@dataclass(frozen=True)
class RankEnds:
    """The caller's ends of the pipes to the keeper."""

    control: int
    status: int
    pipes: tuple[tuple[int, int, int], ...]  # per rank: stdout, stderr, result


@dataclass
class _Rank:
    code: int | None = None
    time: float = 0.0
    stopped: bool = False  # it was ended
    answer: bytearray = field(default_factory=bytearray)

    def result(self) -> dict[str, Any] | None:
        """Return what the rank has sent at its end; None: nothing, or only a part of it."""
        try:
            return dict(pickle.loads(self.answer)) if self.answer else None  # noqa: S301
        except Exception:  # of a truncated pickle: nearly anything
            logger.debug("the result of a rank cannot be read", exc_info=True)
            return None


class SpawnWait:
    """Shows the output of ranks and collects their results until the keeper has ended."""

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
        self._failing = False  # a rank has failed, and the others will be ended
        self._late: list[int] = []

    def results(self) -> list[Any]:
        """Wait for all ranks; return their results, or raise the first cause."""
        try:
            self._follow()
        finally:
            # Also on Ctrl-C: no rank is left behind.
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
        """Yield each descriptor with (rank, 0 stdout, 1 stderr, 2 result); rank -1 is the keeper."""
        yield self._ends.status, (-1, 0)
        for rank, pipes in enumerate(self._ends.pipes):
            for stream, fd in enumerate(pipes):
                yield fd, (rank, stream)

    def _take(self, fd: int, what: tuple[int, int]) -> bool:
        """Read once; return whether there may be more."""
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
        """Return whether a rank that has closed its pipe has failed."""
        return "error" in (self._ranks[rank].result() or {"error": "no result"})

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
        """End the keeper, and read what is left in the pipes."""
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
            if not ready.select(_STOP_TIMEOUT):
                self._kill()
        except KeyboardInterrupt:  # pressed twice
            self._kill()
            raise
        finally:
            ready.close()
            os.close(ended)
            os.waitpid(self._pid, 0)

    def _kill(self) -> None:
        """Kill the keeper. Its ranks die with it, but not their children, which are killed here."""
        below = linux.descendants(self._pid)
        os.kill(self._pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _judge(self) -> list[Any]:
        for line in self._status.splitlines():
            status = json.loads(line)
            if "broken" in status:
                raise LaunchError("the ranks could not be started", details=status["broken"].rstrip().splitlines())
            self._ranks[status["rank"]] = replace(
                self._ranks[status["rank"]], code=status["code"], time=status["time"], stopped=status["stopped"]
            )
        answers = [rank.result() for rank in self._ranks]
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
    ours: bool = False  # it was ended by us
    traceback: str = ""
    exception: bytes = b""
    fix: str = ""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The sort key: the first cause first, consequences of another rank's end last."""
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
        try:
            error.__cause__ = pickle.loads(first.exception)  # noqa: S301
        except Exception:  # many exceptions can be pickled but not unpickled
            logger.debug("the exception of rank %d cannot be unpickled", first.rank, exc_info=True)
    return error


def _too_late(late: list[int], world: int, timeout: float) -> LaunchError:
    names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
    return LaunchError(
        f"{names} of {world} had not ended after {timeout:g} s, and were stopped",
        fix="a longer timeout=…, or find out what they wait for",
    )


class _Lines:
    """Prints whole lines with the rank as a prefix."""

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
