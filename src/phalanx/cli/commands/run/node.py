"""`phalanx node`: runs one node of `phalanx run --hosts`. It reads its spec from stdin and answers on stdout."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from phalanx.cli.commands.run.run import begin
from phalanx.cli.host_specs import rendezvous_config
from phalanx.cli.launch_context import LaunchContext, script_digest
from phalanx.cli.options import RunOptions
from phalanx.cli.planning import make_plan
from phalanx.cluster.software import versions
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract import error_report
from phalanx.contract.variables import HOME
from phalanx.errors import LaunchError, PhalanxError, ScriptError, UsageError
from phalanx.launcher.remote import node_spec, ssh_errors
from phalanx.launcher.remote.node_spec import Fail, Go, NodeRefused, NodeSpec, Ready, Signal
from phalanx.launcher.runs import run_folder

if TYPE_CHECKING:
    from phalanx.launcher.agent.run_hook import HookedAgent

W = TypeVar("W", NodeSpec, Go)
_SAME = "install the same version of phalanx there as here"


def main(argv: list[str]) -> int:
    """Run `phalanx node`. Return 0: node 0 reports the exit code of the run."""
    if argv or os.isatty(0):
        raise UsageError(
            "phalanx node is started by phalanx run --hosts, on every host", fix="phalanx run --hosts a:8,b:2 train.py"
        )
    line = NodeStdio()
    spec = line.wait_for(NodeSpec)
    if spec is None:
        return 1
    line.leads = spec.node == 0
    if line.leads:
        error_report.enable(spec.env)
    environ = _environ(spec)
    try:
        options = msgspec.convert(spec.options, RunOptions, str_keys=True)
        _check(spec, options, environ)
        if line.leads:
            context = LaunchContext() if spec.nodes == 1 else LaunchContext(rendezvous_config(spec, options, None))
            return begin(options, environ, context, line)
        make_plan(options, environ, LaunchContext(rendezvous_config(spec, options, None), node=spec.node))
        line.answer(Ready(host=os.uname().nodename, pid=os.getpid()))
    except (PhalanxError, msgspec.ValidationError) as error:
        if line.answered:
            raise
        line.refuse(error)
        return 1
    go = line.wait_for(Go)
    if go is None:
        return 1
    os.dup2(2, 1)  # the output of ranks goes to node 0; anything else written here is an error message
    begin(options, environ, LaunchContext(rendezvous_config(spec, options, go), node=spec.node), line)
    return 0


def _environ(spec: NodeSpec) -> dict[str, str]:
    environ = {**environment(), **spec.env}
    if not environ.get(HOME) and spec.home and _can_write(spec.home):
        environ[HOME] = spec.home  # on a shared disk, all nodes use one run folder
    return environ


def _can_write(folder: str) -> bool:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


# -- checks before anything starts


def _check(spec: NodeSpec, options: RunOptions, environ: Mapping[str, str]) -> None:
    _check_versions(spec.versions, versions())
    if spec.digest:
        _check_script(options.script.target, spec.digest)
    home = run_folder.home(environ)
    if not _can_write(home):
        raise LaunchError(
            f"runs cannot be kept in {home}: it cannot be written",
            fix="set PHALANX_HOME there to a folder that can be written, or free some space",
        )


def _check_versions(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise if a major version differs. Smaller differences are reported when the node joins."""
    differ = [
        f"{name} {ours.get(name) or 'is missing'} there, {version} here"
        for name, version in theirs.items()
        if ours.get(name, "").split(".")[0] != version.split(".")[0] and name != "nccl"
    ]
    if differ:
        raise LaunchError("its versions differ", details=differ, fix="install the same ones there")


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
            f"the script {path} differs there",
            details=[f"sha256 {found[:16]}… there, {digest[:16]}… here"],
            fix="copy it there again, or work in a folder that all hosts share",
        )


# -- connection to the starter


class NodeStdio:
    """stdin and stdout of this process, reserved for the starter. If they close, the workers of this node end.

    Implements RunHook.
    """

    pids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.leads = False
        self.answered = False
        self._in = os.dup(0)
        self._out = os.dup(1)
        self._inbox = bytearray()
        self._agent: HookedAgent | None = None
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)

    def answer(self, word: Ready | NodeRefused) -> None:
        """Send a message to the starter."""
        self.answered = True
        data = b"\n" + node_spec.MARK + node_spec.encode(word)
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            pass  # the starter is gone; stdin reports that too

    def refuse(self, error: Exception) -> None:
        """Tell the starter that this node cannot take part, and why."""
        if isinstance(error, PhalanxError):
            self.answer(NodeRefused(what=error.what, details=error.details, fix=error.fix))
        else:
            self.answer(NodeRefused(what=f"it cannot read the node spec: {error}", fix=_SAME))

    def wait_for(self, kind: type[W]) -> W | None:
        """Block until a message of this kind arrives. Used before there is an event loop. None: the starter is gone."""
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

    # -- called by the agent

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        """Tell the starter where node 0 listens, if this is node 0."""
        if self.leads:
            addresses = tuple(str(sock.getsockname()[0]) for sock in sockets)
            port = sockets[0].getsockname()[1]
            self.answer(Ready(host=os.uname().nodename, pid=os.getpid(), addresses=addresses, port=port))

    def begin(self, agent: HookedAgent) -> None:
        """Read messages of the starter, now that there is an event loop."""
        import asyncio

        self._agent = agent
        asyncio.get_running_loop().add_reader(self._in, self._read)

    def _read(self) -> None:
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
                    error = ssh_errors.combined({fail.host: refused})
                    if self._agent.all_joined:
                        self._agent.note(str(error))
                    else:
                        self._agent.fail(error)

    def _cut(self) -> None:
        # The reader is gone, so a write would fail.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(null, fd)
        os.close(null)
        if self._agent is not None:
            self._agent.fail(LaunchError("the ssh connection that started this node has ended"))

    def hurry(self) -> None:
        """Do nothing: this node did not start other hosts."""

    async def end(self, code: int) -> None:  # noqa: ARG002
        """Stop reading."""
        import asyncio

        asyncio.get_running_loop().remove_reader(self._in)
