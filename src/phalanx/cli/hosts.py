"""`phalanx run --hosts a:8,b:2 …`: starts every node from one terminal, over plain ssh.

The first host leads. If it is this machine, this process leads; else the leader runs there, and this terminal shows its
output. Every other host runs `phalanx node`, which joins the leader as a node started by hand would.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.cli.host_specs import is_near, node_specs, options_of, rendezvous_config
from phalanx.cli.launch_context import LaunchContext, detect_context
from phalanx.cli.options import RunOptions
from phalanx.cluster.sources.hosts import Host
from phalanx.errors import UsageError
from phalanx.launcher.remote.node_spec import Fail, Go, NodeSpec, Ready, Signal
from phalanx.launcher.runs import run_folder

if TYPE_CHECKING:  # imported only after the fork server has started
    from phalanx.errors import JoinError
    from phalanx.launcher.agent.run_hook import HookedAgent
    from phalanx.launcher.remote.ssh import SshStarter
    from phalanx.launcher.remote.ssh_link import SshLink

_QUIET_START = 3.0  # seconds until slow hosts are named
_FORCE_AFTER = 3  # Ctrl-C presses: the third does not wait for node 0 to answer


Begin = Callable[..., int]  # `commands/run/run.begin`


def start(options: RunOptions, hosts: Sequence[Host], environ: Mapping[str, str], begin: Begin) -> int:
    """Start the run on all hosts and return its exit code. `begin` starts it on this host."""
    # Raises if this process is a task of a scheduler, which itself decides where ranks run.
    alone = replace(
        options,
        nodes=replace(options.nodes, count_given=False, min_nodes=1, max_nodes=1),
        workers=replace(options.workers, slots=None),
    )
    detect_context(alone, environ, run_folder.home(environ))
    if options.script.kind == "stdin":
        raise UsageError("--hosts cannot run a script from standard input", fix="save it as a file on every host")
    near = [is_near(host.name) for host in hosts]
    if near == [True]:
        return begin(options_of(options, hosts, 0, near=True), environ, LaunchContext())
    specs = node_specs(options, hosts, near, environ)
    links = HostLinks(hosts, near, specs, environ)
    if not near[0]:
        import asyncio

        return asyncio.run(RemoteLeader(links, options).run())
    own = options_of(options, hosts, 0, near=True, run_id=specs[0].options["rendezvous"]["run_id"])
    hook = LocalLeader(links, options.rendezvous.join_timeout, options.shutdown.linger or 0.0)
    try:
        return begin(own, environ, LaunchContext(rendezvous_config(specs[0], own, None)), hook)
    finally:
        hook.close()


class HostLinks:
    """Starts a child process for every other host."""

    def __init__(
        self, hosts: Sequence[Host], near: Sequence[bool], specs: Sequence[NodeSpec], environ: Mapping[str, str]
    ) -> None:
        self.specs = specs
        self._hosts = hosts
        self._near = near
        self._environ = environ

    def start(self, nodes: Sequence[int], links: list[SshLink]) -> None:
        """Start `nodes` and append to `links`: the caller knows what was started even if a later start fails."""
        from phalanx.launcher.remote import ssh

        cwd = _cwd(self._environ)
        for node in nodes:
            make = ssh.near if self._near[node] else ssh.ssh
            link = make(node, self._hosts[node].name, environ=self._environ, cwd=cwd)
            links.append(link)
            link.send(self.specs[node])


def _cwd(environ: Mapping[str, str]) -> str:
    """Return the working folder as the user named it: on another host, a symbolic link may have another target."""
    logical = environ.get("PWD", "")
    try:
        if os.path.isabs(logical) and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    return os.getcwd()


class LocalLeader:
    """The other hosts of a run whose node 0 is this process. Implements RunHook."""

    def __init__(self, hosts: HostLinks, patience: float, linger: float) -> None:
        self._hosts = hosts
        self._patience = patience
        self._linger = linger
        self._links: list[SshLink] = []
        self._starter: SshStarter | None = None
        self._agent: HookedAgent | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Return the process ids of the ssh clients."""
        return frozenset(link.process.pid for link in self._links)

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        """Start the other hosts, and send them the address of node 0."""
        from phalanx.launcher.remote.ssh import SshStarter

        go = _go(sockets)
        self._starter = SshStarter(self._links, self, hosts=len(self._hosts.specs), timeout=self._patience * 0.95)
        self._hosts.start(range(1, len(self._hosts.specs)), self._links)
        for link in self._links:
            link.send(go)

    def begin(self, agent: HookedAgent) -> None:
        """Read the answers of the hosts, now that there is an event loop."""
        self._agent = agent
        if self._starter is not None:
            self._starter.listen()

    async def end(self, code: int) -> None:
        """Wait until the other hosts have ended."""
        together = self._agent is not None and self._agent.all_joined
        if self._starter is not None:
            await self._starter.end(together=together, linger=0.0 if code else self._linger)

    def hurry(self) -> None:
        """End the other hosts without waiting."""
        if self._starter is not None:
            self._starter.hurry()

    def close(self) -> None:
        """End the remaining ssh clients."""
        if self._starter is not None:
            self._starter.close()

    # -- called by SshStarter

    def ready(self, link: SshLink) -> None:
        """Do nothing: node 0 is this process, and its address is known."""

    def failed(self, error: JoinError) -> None:
        """End the run: a host cannot take part."""
        if self._agent is not None:
            self._agent.fail(error)

    def ended(self, link: SshLink, code: int) -> None:
        """End the run if a host ends before all have joined; later, print why it ended."""
        from phalanx.launcher.remote import ssh_errors

        if self._agent is None:
            return
        error = ssh_errors.combined({link.host: ssh_errors.explain_end(link, code)})
        if not self._agent.all_joined:
            self._agent.fail(error)
        elif code:
            self._agent.note(str(error))


class RemoteLeader:
    """A run whose node 0 is another machine: shows its output, forwards signals, and exits with its code."""

    def __init__(self, hosts: HostLinks, options: RunOptions) -> None:
        self._hosts = hosts
        self._options = options
        self._links: list[SshLink] = []
        self._over: list[int | JoinError] = []
        self._starter: SshStarter | None = None
        self._interrupts = 0
        self._signals = 0  # number of received signals that end the run

    async def run(self) -> int:
        """Start all hosts, wait for node 0, and return its exit code."""
        import asyncio

        from phalanx.launcher.remote.ssh import SshStarter

        self._done = asyncio.Event()
        patience = self._options.rendezvous.join_timeout * 0.95
        starter = self._starter = SshStarter(self._links, self, hosts=len(self._hosts.specs), timeout=patience)
        together, linger = False, 0.0
        try:
            self._hosts.start(range(len(self._hosts.specs)), self._links)
            leader = self._links[0]
            leader.out, leader.err = _Pipe(1).write, _Pipe(2).write
            self._handle_signals()
            starter.listen()
            await self._wait()
            (outcome,) = self._over
            if isinstance(outcome, int):
                together = starter.code(0) is not None and not self._interrupts >= _FORCE_AFTER
                linger = 0.0 if outcome or self._signals else self._options.shutdown.linger or 0.0
                return outcome
            raise outcome
        finally:
            await starter.end(together=together, linger=linger)

    async def _wait(self) -> None:
        import asyncio

        await asyncio.wait((asyncio.create_task(self._done.wait()),), timeout=_QUIET_START)
        silent = [link.host for link in self._links if not link.settled]
        if silent and not self._options.output.quiet:
            sys.stderr.write(f"phalanx: waiting for {', '.join(silent)} to answer over ssh\n")
        await self._done.wait()

    def _conclude(self, outcome: int | JoinError) -> None:
        if not self._over:
            self._over.append(outcome)
            self._done.set()

    def _handle_signals(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        for number in {*self._options.shutdown.signals, signal.SIGINT}:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # SIG_IGN: started with nohup
                loop.add_signal_handler(number, self._signalled, number)
        for number in {signal.SIGUSR1, signal.SIGUSR2} - {*self._options.shutdown.signals}:
            loop.add_signal_handler(number, self._pass_on, number)

    def _pass_on(self, number: signal.Signals) -> None:
        """Forward to the workers a signal that does not end the run."""
        if self._links[0].answer is not None:
            self._links[0].send(Signal(number=number))

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        self._interrupts += number == signal.SIGINT
        if self._over and self._starter is not None:  # node 0 has ended
            self._starter.hurry()
        elif self._links[0].answer is None or self._interrupts >= _FORCE_AFTER:
            self._conclude(128 + number)
        else:
            self._links[0].send(Signal(number=number))

    # -- called by SshStarter

    def ready(self, link: SshLink) -> None:
        """Send the address of node 0 to the other hosts."""
        if link.node == 0 and isinstance(link.answer, Ready):
            for other in self._links[1:]:
                other.send(Go(addresses=link.answer.addresses, port=link.answer.port))

    def failed(self, error: JoinError) -> None:
        """End the run: a host cannot take part."""
        self._conclude(error)

    def ended(self, link: SshLink, code: int) -> None:
        """End the run with node 0; tell node 0 about any other host that failed."""
        from phalanx.launcher.remote import ssh_errors

        if link.node:
            if code:
                trouble = ssh_errors.explain_end(link, code)
                fail = Fail(host=link.host, what=trouble.what, details=trouble.details, fix=trouble.fix)
                self._links[0].send(fail)
            return
        if code == ssh_errors.SSH_FAILED:
            why = "the connection was cut, or that is how node 0 ended"
            sys.stderr.write(f"phalanx: ssh {link.host} has ended with {code}: {why}\n")
        self._conclude(128 - code if code < 0 else code)


class _Pipe:
    """Writes the output of node 0 to a descriptor. If the reader closes it, the run continues."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:
            import select

            select.select([], [self._fd], [])
            self.write(data)
        except OSError:
            pass


def _go(sockets: Sequence[socket.socket]) -> Go:
    return Go(addresses=tuple(str(sock.getsockname()[0]) for sock in sockets), port=sockets[0].getsockname()[1])
