"""The ranks of one `phalanx.spawn`, on the caller's side: started, shown, collected, ended."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.contract.variables import (
    INTERFACES,
    LINE,
    LIVE_BAR,
    MEMORY,
    RUN,
    RUN_FOLDER,
    THREADS,
    TOPOLOGY,
    WorkerVariables,
    worker_environment,
)
from phalanx.errors import LaunchError
from phalanx.forkserver import linux, wire
from phalanx.launcher.spawn import failure as spawn_failure
from phalanx.launcher.spawn import stacks as spawn_stacks
from phalanx.launcher.spawn.output import shows_bars
from phalanx.launcher.spawn.pipes import RankPipes

_ADDRESS = "127.0.0.1"
_SETTLE = 0.2  # seconds after a failure for other ranks to report theirs: the first cause may be reported second
_LINGER = 5.0  # seconds for a rank that has reported a failure to end
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_PATIENCE = 0.5  # seconds for processes that end by themselves: resource tracker, torch's manager of shared memory
_STOP_TIMEOUT = 15.0  # seconds for the fork server to end all of them
_NEVER = float("inf")


class SpawnGroup:
    """Orders the ranks from a fork server, shows their output and collects their results until all have ended."""

    def __init__(self, sock: socket.socket, pid: int, ranks: int, backend: str | None, timeout: float | None) -> None:
        self._sock = sock
        self._pid = pid  # of the fork server
        self._backend = backend  # of the process group; "": choose one; None: make no group
        self._timeout = timeout
        self._store_key = os.urandom(32).hex()
        self._deadline = _NEVER if timeout is None else time.monotonic() + timeout
        self._stop_at = _NEVER  # a rank has failed, and the others will be ended
        self._kill_at = _NEVER  # the fork server was asked to end
        self._ready = False  # the fork server has imported torch
        self._hosts_store = False
        self._lost = False  # it has ended unexpectedly
        self._ended = False
        self._broken: LaunchError | None = None
        self._pipes = RankPipes(ranks)
        try:
            # Bound here, so that the port stays free until the store listens.
            self._listener = self._pipes.open_.enter_context(socket.create_server((_ADDRESS, 0), backlog=1024))
            self._pipes.make()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                least = 7 * ranks + len(os.listdir("/proc/self/fd")) + 10
                raise LaunchError(
                    f"{ranks} ranks need more open files than this process may have", fix=f"ulimit -n {least}"
                ) from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End everything that remains."""
        self._end()
        self._pipes.close()

    # -- while they run

    def results(self) -> list[Any]:
        """Wait for all ranks; return their results, or raise the first cause.

        Raises KeyboardInterrupt with the places at which the ranks were, after it has ended them.
        """
        started = time.monotonic()
        interrupted: KeyboardInterrupt | None = None
        try:
            try:
                self._follow()
            except KeyboardInterrupt:
                details = self._where(time.monotonic() - started)
                interrupted = spawn_failure.interruption(self._running(), len(self._pipes.ranks), details)
        finally:
            self._end()
        if interrupted is not None:
            raise interrupted
        return self._judge()

    def _follow(self) -> None:
        """Handle messages and output until the fork server has ended."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._sock, selectors.EVENT_READ, None)
            for fd, what in self._pipes.sources():
                ready.register(fd, selectors.EVENT_READ, what)
            while time.monotonic() < self._kill_at:
                wait = min(self._deadline, self._stop_at, self._kill_at) - time.monotonic()
                for key, _ in ready.select(None if wait == _NEVER else max(wait, 0.0)):
                    if key.data is not None:
                        if not self._read(key.fd, *key.data):
                            ready.unregister(key.fd)
                    elif (received := wire.receive(self._sock)) is None:
                        self._lost = self._kill_at == _NEVER
                        return
                    else:
                        self._handle(received[0])
                self._check_deadlines()

    def _handle(self, message: wire.Message) -> None:
        """Handle a message of the fork server. There is at most one open order, so that neither side blocks the
        other.
        """
        match message["is"]:
            case "ready":
                self._ready, self._hosts_store = True, message["torch"]
                self._order_next()
            case "started":
                if message["name"].isdigit():
                    self._pipes.ranks[int(message["name"])].pid = message["pid"]
                self._order_next()
            case "refused":
                self._broken = LaunchError(
                    f"rank {message['name']} could not be started: {message['why']}",
                    fix="ulimit -u, or the memory that is left",
                )
                self._stop()
            case "broken":
                self._broken = LaunchError(
                    "the ranks could not be started", details=message["why"].rstrip().splitlines()
                )
            case "exited" if message["name"] == "store":
                self._broken = LaunchError("the store of the ranks has ended before them")
                self._stop()
            case "exited":
                self._exited(int(message["name"]), os.waitstatus_to_exitcode(message["status"]), message["time"])
            case "signalled" if message["signal"] in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._stop()

    def _order_next(self) -> None:
        """Order the next rank, and after the last one the store: ranks that connect earlier wait in its queue."""
        if self._listener.fileno() < 0 or self._kill_at != _NEVER:
            return
        nothing = self._pipes.nothing
        if self._pipes.waiting:
            with self._pipes.next_rank() as (rank, theirs):
                stack = self._pipes.ranks[rank].stack
                order = {
                    "do": "start",
                    "name": str(rank),
                    "environ": self._environment(rank),
                    "backend": self._backend,
                    "store_key": self._store_key,
                }
                self._send(
                    {**order, "args": sys.argv[1:], "command": sys.orig_argv},
                    (nothing, *theirs, stack),
                )
            return
        if self._hosts_store:
            port = self._listener.getsockname()[1]
            store = {"address": _ADDRESS, "port": port}
            order = {"do": "store", "name": "store", "environ": environment(), "store": store}
            self._send(order, (nothing, nothing, nothing, self._listener.fileno()))
        self._listener.close()

    def _send(self, order: wire.Message, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it has ended: the end of the connection is handled next
            wire.send(self._sock, order, list(fds))

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank, as under `phalanx run` on one node."""
        own = (RUN, RUN_FOLDER, LINE, MEMORY, TOPOLOGY)  # of this process, if it is a rank of another run
        environ = {
            name: value
            for name, value in environment().items()
            if name not in own and not name.startswith("TORCHELASTIC_")
        }
        ranks = len(self._pipes.ranks)
        member = WorkerVariables(
            placement=RankPlacement(
                rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, node_rank=0, node_count=1
            ),
            role="default",
            run_id=f"spawn-{os.getpid()}",
            run="",
            run_folder="",
            address=_ADDRESS,
            port=self._listener.getsockname()[1],
            attempt=0,
            max_restarts=0,
            error_file="",
            signals="",
        )
        # All ranks are on this host, whatever its name resolves to.
        defaults = {name: form.format("lo") for name, form in INTERFACES.items()}
        if ranks > 1:
            defaults[THREADS] = "1"
        if rank == 0 and shows_bars(sys.stderr):
            defaults[LIVE_BAR] = "1"
        return {
            **defaults,
            **environ,
            **{name: value for name, value in worker_environment(member, environ).items() if value},
        }

    def _read(self, fd: int, rank: int, stream: int) -> bool:
        """Read once from a rank; return whether there may be more later."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        self._pipes.take(data, rank, stream)
        if not data and stream == 2 and "error" in (self._pipes.ranks[rank].result() or ()):
            self._stop_at = min(self._stop_at, time.monotonic() + _LINGER)
        return bool(data)

    def _exited(self, rank: int, code: int, when: float) -> None:
        state = self._pipes.ranks[rank]
        state.code, state.time = code, when
        self._pipes.read_rest(state.ours[2], rank, 2)
        if all(state.code is not None for state in self._pipes.ranks):
            self._stop(patience=_PATIENCE)
        elif code or state.result() is None:
            self._stop_at = min(self._stop_at, time.monotonic() + _SETTLE)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self._deadline and self._stop_at == self._kill_at == _NEVER:
            timeout = self._timeout or 0.0
            details = self._where(timeout)
            self._broken = spawn_failure.timeout_error(self._running(), len(self._pipes.ranks), timeout, details)
        if now >= min(self._deadline, self._stop_at):
            self._deadline = self._stop_at = _NEVER
            self._stop()

    def _running(self) -> list[int]:
        return [rank for rank, state in enumerate(self._pipes.ranks) if state.code is None]

    def _where(self, waited: float) -> list[str]:
        """Return lines about where the ranks are that run, and which of them the others wait for."""
        ranks = self._pipes.ranks
        started = {rank: (ranks[rank].pid, ranks[rank].stack) for rank in self._running() if ranks[rank].pid}
        return spawn_stacks.verdict(spawn_stacks.collect(started), len(ranks), waited)

    # -- their end

    def _stop(self, patience: float = 0.0) -> None:
        """Make the fork server end everything below it, and itself."""
        if self._kill_at == _NEVER:
            self._pipes.drop_noise()
            self._kill_at = time.monotonic() + _STOP_TIMEOUT
            self._send({"do": "end", "patience": patience, "grace": _GRACE})

    def _end(self) -> None:
        """End the fork server, and show the remaining data in the pipes."""
        if self._ended:
            return
        self._ended = True
        self._stop()
        try:
            # Before it is ready it reads nothing, and has no ranks.
            if not _ends(self._pid, self._kill_at - time.monotonic() if self._ready else 0.0):
                self._kill()
        except KeyboardInterrupt:  # pressed twice
            self._kill()
            raise
        finally:
            with contextlib.suppress(ChildProcessError):  # a caller that ignores SIGCHLD
                os.waitpid(self._pid, 0)
        self._pipes.finish()

    def _kill(self) -> None:
        """Kill the fork server. Its ranks end with it, but not their children, which are killed here."""
        below = linux.descendants(self._pid)
        for pid in (self._pid, *below):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _judge(self) -> list[Any]:
        if self._broken is not None:
            raise self._broken
        answers = [state.result() for state in self._pipes.ranks]
        found = [
            spawn_failure.find(rank, answer, code=state.code, ended=state.time, stopped=not self._lost)
            for rank, (state, answer) in enumerate(zip(self._pipes.ranks, answers, strict=True))
        ]
        failures = [failure for failure in found if failure is not None]
        if failures:
            raise spawn_failure.error(failures, len(self._pipes.ranks))
        return [pickle.loads(answer["value"]) for answer in answers if answer]  # noqa: S301


def _ends(pid: int, timeout: float) -> bool:
    """Wait up to `timeout` seconds for a child to end; return whether it has. Does not reap it."""
    with contextlib.ExitStack() as stack:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:  # no descriptor is left: the caller kills it
            return False
        stack.callback(os.close, ended)
        ready = stack.enter_context(selectors.PollSelector())  # needs no descriptor
        ready.register(ended, selectors.EVENT_READ)
        return bool(ready.select(max(timeout, 0.0)))
