"""`phalanx node`: one node of `phalanx run --hosts`. It is told over stdin what to do, and says on stdout if it can."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from phalanx.cli.commands.run import begin
from phalanx.cli.hosts import gathering_of
from phalanx.cli.options import RunOptions
from phalanx.cli.planning import make_plan
from phalanx.cli.surroundings import Surroundings, script_digest
from phalanx.cluster.software import versions
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract import error_report
from phalanx.contract.variables import HOME
from phalanx.errors import LaunchError, PhalanxError, ScriptError, UsageError
from phalanx.launch.remote import node_spec, ssh
from phalanx.launch.remote.node_spec import Fail, Go, NodeRefused, NodeSpec, Ready, Signal
from phalanx.launch.runs import run_folder

if TYPE_CHECKING:
    from phalanx.launch.agent.agent import NodeAgent

W = TypeVar("W", NodeSpec, Go)
_SAME = "install the same version of phalanx there as here"


def main(argv: list[str]) -> int:
    if argv or os.isatty(0):
        raise UsageError(
            "phalanx node is what phalanx run --hosts starts on every host", fix="phalanx run --hosts a:8,b:2 train.py"
        )
    line = NodeStdio()
    told = line.wait_for(NodeSpec)
    if told is None:
        return 1
    line.leads = told.node == 0
    if line.leads:
        error_report.enable(told.env)
    environ = _environ(told)
    try:
        options = msgspec.convert(told.options, RunOptions, str_keys=True)
        _check(told, options, environ)
        if line.leads:
            around = Surroundings() if told.nodes == 1 else Surroundings(gathering_of(told, options, None))
            return begin(options, environ, around, line)
        make_plan(options, environ, Surroundings(gathering_of(told, options, None), node=told.node))
        line.answer(Ready(host=os.uname().nodename, pid=os.getpid()))
    except (PhalanxError, msgspec.ValidationError) as error:
        if line.answered:
            raise
        line.refuse(error)
        return 1
    go = line.wait_for(Go)
    if go is None:
        return 1
    os.dup2(2, 1)  # all that its ranks write is seen at node 0; should anything else come, it is trouble
    begin(options, environ, Surroundings(gathering_of(told, options, go), node=told.node), line)
    return 0  # the run's own code is node 0's to tell


def _environ(told: NodeSpec) -> dict[str, str]:
    environ = {**environment(), **told.env}
    if not environ.get(HOME) and told.home and _can_write(told.home):
        environ[HOME] = told.home  # where the disk is shared, a run has one folder
    return environ


def _can_write(folder: str) -> bool:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


# -- what can be known before anything starts


def _check(told: NodeSpec, options: RunOptions, environ: Mapping[str, str]) -> None:
    _check_versions(told.versions, versions())
    if told.digest:
        _check_script(options.script, told.digest)
    home = run_folder.home(environ)
    if not _can_write(home):
        raise LaunchError(
            f"runs cannot be kept in {home}: it cannot be written",
            fix="set PHALANX_HOME there to a folder that can be written, or free some space",
        )


def _check_versions(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Another first number is another program; what differs less is said when the node joins."""
    differ = [
        f"{name} {ours.get(name) or 'is missing'} there, {version} here"
        for name, version in theirs.items()
        if ours.get(name, "").split(".")[0] != version.split(".")[0] and name != "nccl"
    ]
    if differ:
        raise LaunchError("it has other versions", details=differ, fix="install the same ones there")


def _check_script(path: str, digest: str) -> None:
    try:
        found = script_digest(path)
    except OSError as error:
        raise ScriptError(
            f"the script {path} is not there: {error.strerror}",
            details=[f"looked in {os.getcwd()}"],
            fix="copy it there, or work in a folder that all hosts share",
        ) from None
    if found != digest:
        raise ScriptError(
            f"the script {path} is another one there",
            details=[f"sha256 {found[:16]}… there, {digest[:16]}… here"],
            fix="copy it there again, or work in a folder that all hosts share",
        )


# -- the line to the starter


class NodeStdio:
    """stdin and stdout, taken away from everything else. Its end is the end of this node's workers."""

    pids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.leads = False
        self.answered = False
        self._in = os.dup(0)
        self._out = os.dup(1)
        self._inbox = bytearray()
        self._agent: NodeAgent | None = None
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)

    def answer(self, word: Ready | NodeRefused) -> None:
        self.answered = True
        data = b"\n" + node_spec.MARK + node_spec.encode(word)
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            pass  # nobody waits for it any more: the end of our input says so too

    def refuse(self, error: Exception) -> None:
        if isinstance(error, PhalanxError):
            self.answer(NodeRefused(what=error.what, details=error.details, fix=error.fix))
        else:
            self.answer(NodeRefused(what=f"it does not understand what is wanted: {error}", fix=_SAME))

    def wait_for(self, kind: type[W]) -> W | None:
        """Before there is a loop. None: nobody is there any more."""
        while b"\n" not in self._inbox:
            if not self._receive():
                return None
        word = self._next()
        return word if isinstance(word, kind) else None

    def _receive(self) -> bool:
        data = os.read(self._in, 1 << 16)
        self._inbox += data
        return bool(data) and len(self._inbox) <= node_spec.LIMIT

    def _next(self) -> node_spec.ToNode | None:
        end = self._inbox.index(b"\n")
        line = bytes(self._inbox[:end])
        del self._inbox[: end + 1]
        try:
            return node_spec.to_node(line)
        except ValueError as error:
            self.refuse(error)
            return None

    # -- while it is supervised

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        if self.leads:
            addresses = tuple(str(sock.getsockname()[0]) for sock in sockets)
            port = sockets[0].getsockname()[1]
            self.answer(Ready(host=os.uname().nodename, pid=os.getpid(), addresses=addresses, port=port))

    def begin(self, agent: NodeAgent) -> None:
        import asyncio

        self._agent = agent
        asyncio.get_running_loop().add_reader(self._in, self._hear)

    def _hear(self) -> None:
        if not self._receive():
            import asyncio

            asyncio.get_running_loop().remove_reader(self._in)
            self._cut()
        while b"\n" in self._inbox:
            match self._next():
                case Signal(number=number):
                    os.kill(os.getpid(), signal.Signals(number))
                case Fail() as fail if self._agent is not None:
                    refused = NodeRefused(what=fail.what, details=fail.details, fix=fail.fix)
                    error = ssh.combined({fail.host: refused})
                    if self._agent.together:
                        self._agent.note(str(error))
                    else:
                        self._agent.fail(error)

    def _cut(self) -> None:
        # Whoever would read it is gone, and a write would fail.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(null, fd)
        os.close(null)
        if self._agent is not None:
            self._agent.fail(LaunchError("the ssh connection that started this node has ended"))

    def hurry(self) -> None:
        pass

    async def end(self, code: int) -> None:  # noqa: ARG002
        import asyncio

        asyncio.get_running_loop().remove_reader(self._in)
