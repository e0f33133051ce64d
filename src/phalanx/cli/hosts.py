"""`phalanx run --hosts a:8,b:2 …`: every node from one terminal, over plain ssh.

The first host leads. Where that is this machine, this very process does; else it runs over there, and this terminal
shows what it writes. All other hosts get a `phalanx node`, which joins the leader as a node started by hand would.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from phalanx.cli.options import RunOptions
from phalanx.cli.options.values import devices
from phalanx.cli.surroundings import Surroundings, look_around, script_digest, terms
from phalanx.cluster.software import versions
from phalanx.cluster.sources.hosts import Host
from phalanx.contract.variables import HOME
from phalanx.control import interfaces, tokens
from phalanx.control.tokens import Token
from phalanx.errors import UsageError
from phalanx.launch.coordination.rendezvous_config import RendezvousConfig
from phalanx.launch.remote import node_spec
from phalanx.launch.remote.node_spec import Fail, Go, NodeSpec, Ready, Signal
from phalanx.launch.runs import run_folder

if TYPE_CHECKING:  # only once the fork server has been started
    from phalanx.errors import JoinError
    from phalanx.launch.agent.agent import NodeAgent
    from phalanx.launch.remote.ssh import SshLink, SshStarter

_SOON = 3.0  # seconds that need no explanation
_FOLLOWS = 0.75  # of the time to join
_AT_ONCE = 3  # times Ctrl-C: the third does not wait for node 0 to answer


Begin = Callable[..., int]  # `commands/run.begin`


def start(options: RunOptions, hosts: Sequence[Host], environ: Mapping[str, str], begin: Begin) -> int:
    """Start the other hosts over ssh; `begin` starts the run on this one."""
    # A scheduler that has started us as one of its tasks has its own idea of who runs where.
    alone = replace(options, nodes_told=False, min_nodes=1, max_nodes=1, slots=None)
    look_around(alone, environ, run_folder.home(environ))
    if options.kind == "stdin":
        raise UsageError("--hosts cannot run a script from standard input", fix="save it as a file on every host")
    near = [_is_near(host.name) for host in hosts]
    if near == [True]:
        return begin(_options_of(options, hosts, 0, near=True), environ, Surroundings())
    orders = _orders(options, hosts, near, environ)
    links = Hosts(hosts, near, orders, environ)
    if not near[0]:
        import asyncio

        return asyncio.run(RemoteHost(links, options).run())
    own = _options_of(options, hosts, 0, near=True, run_id=orders[0].options["run_id"])
    outside = LocalHost(links, options.join_timeout, options.linger or 0.0)
    try:
        return begin(own, environ, Surroundings(gathering_of(orders[0], own, None)), outside)
    finally:
        outside.close()


# -- who gets which order


def _orders(
    options: RunOptions, hosts: Sequence[Host], near: Sequence[bool], environ: Mapping[str, str]
) -> list[NodeSpec]:
    token = tokens.new()  # ssh has let us in already, and keeps it: no file, and no run that another one could join
    run_id = options.run_id or run_folder.make_run_id(options.script)
    promised = [host.workers for host in hosts]
    digest = ""
    if options.kind in ("script", "path") and os.path.isfile(options.script):
        digest = script_digest(options.script)
    return [
        NodeSpec(
            node=node,
            nodes=len(hosts),
            token=token,
            options=msgspec.to_builtins(
                _options_of(options, hosts, node, near=near[node], run_id=run_id), str_keys=True
            ),
            digest=digest,
            versions=versions(),
            env=node_spec.chosen(environ),
            home=environ.get(HOME, ""),
            names=tuple(host.name for host in hosts),
            promised=tuple(count for count in promised if count is not None) if None not in promised else (),
            host=_meeting_name(options.master_addr, hosts, near),
            port=options.master_port or 0,
        )
        for node in range(len(hosts))
    ]


def _options_of(
    options: RunOptions, hosts: Sequence[Host], node: int, *, near: bool, run_id: str | None = None
) -> RunOptions:
    """What this host would have been told by hand."""
    host, nodes = hosts[node], len(hosts)
    leads_here = node == 0 and near
    colour = options.color
    if node == 0 and not near and colour == "auto" and os.isatty(1) and os.isatty(2):
        colour = "always"  # it writes to this terminal, and cannot know
    own = replace(
        options,
        hosts=None,
        min_nodes=nodes,
        max_nodes=nodes,
        nodes_told=True,
        node_id=node,
        slots=None,
        master_addr=None,
        run_id=run_id or options.run_id,
        token_file=None,
        no_auth=False,
        color=colour,
        stdin=options.stdin if leads_here else None,  # this terminal is here
    )
    if host.devices is not None:
        return replace(own, devices=devices(host.devices), workers=None)
    return own if host.slots is None else replace(own, workers=host.slots)


def gathering_of(told: NodeSpec, options: RunOptions, go: Go | None) -> RendezvousConfig:
    return RendezvousConfig(
        source="ssh",
        expected=told.nodes,
        member=told.node,
        leads=told.node == 0,
        host=told.host,
        port=told.port if go is None else go.port,
        token=Token(bytes.fromhex(told.token), "phalanx run --hosts"),
        run=options.run_id or "",
        addresses=() if go is None else go.addresses,
        promised=told.promised,
        # A node that cannot reach the leader knows more about it than the leader: it is to speak first.
        join_timeout=options.join_timeout * (_FOLLOWS if told.node else 1),
        node_timeout=options.node_timeout,
        names=told.names,
        echo=False,
        versions=versions(),
        terms=terms(options, told.nodes, told.promised),
    )


def _meeting_name(told: str | None, hosts: Sequence[Host], near: Sequence[bool]) -> str | None:
    """What the others may call node 0. None: no name of it means anything on another machine."""
    if all(near):
        return "127.0.0.1"
    for name in (told, hosts[0].name.rpartition("@")[2]):
        if name and name != "localhost" and not interfaces.is_loopback(name):
            return name
    return None


def _is_near(name: str) -> bool:
    """Whether the host is this machine, and the user this one."""
    user, _, host = name.rpartition("@")
    if user and user != pwd.getpwuid(os.geteuid()).pw_name:
        return False
    if host in ("localhost", os.uname().nodename):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # ssh may know more about it
    here = interfaces.survey()
    return all(interfaces.owner(str(where[0]), here) is not None for *_, where in found)


# -- children


class Hosts:
    """A child for every host that this process is not itself."""

    def __init__(
        self, hosts: Sequence[Host], near: Sequence[bool], orders: Sequence[NodeSpec], environ: Mapping[str, str]
    ) -> None:
        self.orders = orders
        self._hosts = hosts
        self._near = near
        self._environ = environ

    def start(self, nodes: Sequence[int], links: list[SshLink]) -> None:
        """Into a list that the caller has, so that what was started is known even if the next one fails."""
        from phalanx.launch.remote import ssh

        cwd = _cwd(self._environ)
        for node in nodes:
            make = ssh.near if self._near[node] else ssh.ssh
            link = make(node, self._hosts[node].name, environ=self._environ, cwd=cwd)
            links.append(link)
            link.send(self.orders[node])


def _cwd(environ: Mapping[str, str]) -> str:
    """As the user calls it: what a link leads to may have another name on another host."""
    logical = environ.get("PWD", "")
    try:
        if os.path.isabs(logical) and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    return os.getcwd()


class LocalHost:
    """Node 0 is this process: what its agent has to know of the others."""

    def __init__(self, hosts: Hosts, patience: float, linger: float) -> None:
        self._hosts = hosts
        self._patience = patience
        self._linger = linger
        self._links: list[SshLink] = []
        self._starter: SshStarter | None = None
        self._agent: NodeAgent | None = None

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(link.process.pid for link in self._links)

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        from phalanx.launch.remote.ssh import SshStarter

        go = _go(sockets)
        self._starter = SshStarter(self._links, self, hosts=len(self._hosts.orders), timeout=self._patience * 0.95)
        self._hosts.start(range(1, len(self._hosts.orders)), self._links)
        for link in self._links:
            link.send(go)

    def begin(self, agent: NodeAgent) -> None:
        self._agent = agent
        if self._starter is not None:
            self._starter.listen()

    async def end(self, code: int) -> None:
        together = self._agent is not None and self._agent.together
        if self._starter is not None:
            await self._starter.end(together=together, linger=0.0 if code else self._linger)

    def hurry(self) -> None:
        if self._starter is not None:
            self._starter.hurry()

    def close(self) -> None:
        if self._starter is not None:
            self._starter.close()

    # -- what comes from the hosts

    def ready(self, link: SshLink) -> None:
        pass

    def failed(self, error: JoinError) -> None:
        if self._agent is not None:
            self._agent.fail(error)

    def ended(self, link: SshLink, code: int) -> None:
        from phalanx.launch.remote import ssh

        if self._agent is None:
            return
        error = ssh.combined({link.host: ssh.explain_end(link, code)})
        if not self._agent.together:
            self._agent.fail(error)
        elif code:
            self._agent.note(str(error))


class RemoteHost:
    """Node 0 is another machine: this one shows what it writes, hands on signals, and ends as it ends."""

    def __init__(self, hosts: Hosts, options: RunOptions) -> None:
        self._hosts = hosts
        self._options = options
        self._links: list[SshLink] = []
        self._over: list[int | JoinError] = []
        self._starter: SshStarter | None = None
        self._interrupts = 0
        self._signals = 0  # that were to end the run

    async def run(self) -> int:
        import asyncio

        from phalanx.launch.remote.ssh import SshStarter

        self._done = asyncio.Event()
        patience = self._options.join_timeout * 0.95
        starter = self._starter = SshStarter(self._links, self, hosts=len(self._hosts.orders), timeout=patience)
        together, linger = False, 0.0
        try:
            self._hosts.start(range(len(self._hosts.orders)), self._links)
            leader = self._links[0]
            leader.out, leader.err = _Pipe(1).write, _Pipe(2).write
            self._handle_signals()
            starter.listen()
            await self._wait()
            (outcome,) = self._over
            if isinstance(outcome, int):
                together = starter.code(0) is not None and not self._interrupts >= _AT_ONCE
                linger = 0.0 if outcome or self._signals else self._options.linger or 0.0
                return outcome
            raise outcome
        finally:
            await starter.end(together=together, linger=linger)

    async def _wait(self) -> None:
        import asyncio

        await asyncio.wait((asyncio.create_task(self._done.wait()),), timeout=_SOON)
        silent = [link.host for link in self._links if not link.settled]
        if silent and not self._options.quiet:
            sys.stderr.write(f"phalanx: waiting for {', '.join(silent)} to answer over ssh\n")
        await self._done.wait()

    def _conclude(self, outcome: int | JoinError) -> None:
        if not self._over:
            self._over.append(outcome)
            self._done.set()

    def _handle_signals(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        for number in {*self._options.signals, signal.SIGINT}:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._signalled, number)
        for number in {signal.SIGUSR1, signal.SIGUSR2} - {*self._options.signals}:
            loop.add_signal_handler(number, self._pass_on, number)

    def _pass_on(self, number: signal.Signals) -> None:
        """For the workers; it ends nothing."""
        if self._links[0].answer is not None:
            self._links[0].send(Signal(number=number))

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        self._interrupts += number == signal.SIGINT
        if self._over and self._starter is not None:  # only other nodes are waited for
            self._starter.hurry()
        elif self._links[0].answer is None or self._interrupts >= _AT_ONCE:
            self._conclude(128 + number)
        else:
            self._links[0].send(Signal(number=number))

    # -- what comes from the hosts

    def ready(self, link: SshLink) -> None:
        if link.node == 0 and isinstance(link.answer, Ready):
            for other in self._links[1:]:
                other.send(Go(addresses=link.answer.addresses, port=link.answer.port))

    def failed(self, error: JoinError) -> None:
        self._conclude(error)

    def ended(self, link: SshLink, code: int) -> None:
        from phalanx.launch.remote import ssh

        if link.node:
            if code:
                trouble = ssh.explain_end(link, code)
                fail = Fail(host=link.host, what=trouble.what, details=trouble.details, fix=trouble.fix)
                self._links[0].send(fail)
            return
        if code == ssh.SSH_FAILED:
            why = "the connection was cut, or that is how node 0 ended"
            sys.stderr.write(f"phalanx: ssh {link.host} has ended with {code}: {why}\n")
        self._conclude(128 - code if code < 0 else code)


class _Pipe:
    """What node 0 writes, as it comes. A reader who has gone is no reason to end the run."""

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
