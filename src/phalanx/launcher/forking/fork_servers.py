"""The agent's side of a fork server: starting one, sending orders, receiving results."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.cluster.placement import Seat
from phalanx.forkserver import wire
from phalanx.launcher.command import Command
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.plan import Plan

_FOLDER = os.path.dirname(os.path.abspath(wire.__file__))
_HOOK = os.path.join(_FOLDER, "hook")
_TORCH = ("torch", "torch.distributed")
LOG = "forkserver.log"  # in the run folder: output of imports
_SEND_TIMEOUT = 10.0  # seconds; a stopped fork server must not block the agent, which would not handle Ctrl-C


@dataclass
class ForkServerClient:
    """A connection to a fork server. `mode`: cold (imports, then forks), warm (has imported), fresh (executes)."""

    sock: socket.socket
    mode: str
    process: subprocess.Popen[bytes] | None = None  # None: a warm one, which is not our child
    ready: wire.Message | None = None  # its first message, if it is warm

    @property
    def pid(self) -> int:
        """Return the pid of the fork server."""
        return self.process.pid if self.process is not None else int((self.ready or {})["pid"])

    @property
    def is_child(self) -> bool:
        """Return whether it is a child of this process, which then adopts processes that outlive it. A warm one is
        not.
        """
        return self.process is not None

    @property
    def forks(self) -> bool:
        """Return whether it forks workers rather than executing them."""
        return self.mode != "fresh"

    @property
    def closed(self) -> bool:
        """Return whether the connection is closed: the fork server was lost or has ended, and takes no orders."""
        return self.sock.fileno() < 0

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send an order. Raises OSError if the fork server has ended, or does not read although its buffer is full."""
        self.sock.settimeout(_SEND_TIMEOUT)
        try:
            wire.send(self.sock, message, list(fds))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it has a part of the message
            raise

    def receive(self) -> wire.Message | None:
        """Receive a message. None: the fork server has ended."""
        received = wire.receive(self.sock)
        return None if received is None else received[0]

    def gone(self) -> int | None:
        """Close the connection and return the exit code of a fork server that has ended."""
        self.sock.close()
        return None if self.process is None else self.process.wait()


def make(plan: Plan, hints: PreloadHints | None, *, log: int) -> ForkServerClient:
    """Start the fork server of a run, or a replacement. Without `hints` it is fresh."""
    if hints is None:
        return fresh(plan.environ, log=log)
    required = [*_TORCH, *plan.start.preload]
    return cold(plan.command, hints.applied(plan.environ), required=required, welcome=hints.modules, log=log)


def cold(
    command: Command,
    environ: Mapping[str, str],
    *,
    required: Sequence[str],
    welcome: Sequence[str],
    log: int,
) -> ForkServerClient:
    """Start the script's interpreter, paused before its main module."""
    ours, theirs = socket.socketpair()
    hooked = {
        **environ,
        "PYTHONPATH": os.pathsep.join([_HOOK, *filter(None, [environ.get("PYTHONPATH")])]),
        "PHALANX_FORKSERVER": f"{theirs.fileno()}:{os.getpid()}",
    }
    if "PYTHONPATH" in environ:
        hooked["PHALANX_PYTHONPATH"] = environ["PYTHONPATH"]
    process = _spawn(command.line(0), hooked, theirs, log)
    fork_server = ForkServerClient(ours, "cold", process)
    fork_server.send({"do": "import", "required": list(required), "optional": list(welcome), "path0": command.path0})
    return fork_server


def fresh(environ: Mapping[str, str], *, log: int) -> ForkServerClient:
    """Start a fork server without imports: every worker is a new interpreter or program."""
    ours, theirs = socket.socketpair()
    line = [sys.executable, "-I", "-S", _FOLDER, str(theirs.fileno()), str(os.getpid())]
    process = _spawn(line, dict(environ), theirs, log)
    fork_server = ForkServerClient(ours, "fresh", process)
    fork_server.send({"do": "import", "required": [], "optional": [], "path0": None})
    return fork_server


def _spawn(line: list[str], environ: dict[str, str], theirs: socket.socket, log: int) -> subprocess.Popen[bytes]:
    """Start a process in its own session, because Ctrl-C in the terminal is for the agent."""
    with theirs:
        return subprocess.Popen(
            line,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )


def store_order(fork_server: ForkServerClient, plan: Plan, port: int) -> wire.Message:
    """Return the order to start the store: forked if the fork server has torch, else executed."""
    store = {"address": plan.group.master_addr, "port": port, "outlives": fork_server.is_child}
    store["remote"] = plan.rendezvous is not None
    store["gate"] = plan.rendezvous is None or bool(plan.rendezvous.token.key)
    order: wire.Message = {"do": "store", "name": "store", "environ": dict(plan.environ), "store": store}
    if not fork_server.forks:
        order["exec"] = [plan.command.python, os.path.join(_FOLDER, "store")]
    return order


def worker_order(
    fork_server: ForkServerClient, name: str, command: Command, seat: Seat, environ: Mapping[str, str]
) -> wire.Message:
    """Return the order to start a worker: forked and continuing as this command, or executed."""
    line = command.line(seat.local_rank)
    order: wire.Message = {
        "do": "start",
        "name": name,
        "environ": dict(environ),
        "cores": list(seat.slot.cores),
        "command": line,
        "path0": command.path0,
    }
    if not fork_server.forks:
        return {**order, "exec": line, "hook": "" if command.kind == "program" else _HOOK}
    order["args"] = command.arguments(seat.local_rank)
    if command.kind == "path":
        order["args"].insert(0, command.target)
    if fork_server.mode == "warm":
        order |= {"cwd": os.getcwd(), "umask": _umask(), "main": [command.kind, command.target]}
    return order


def _umask() -> int:
    """Return the umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
