"""Starts `phalanx node` on the hosts of `run --hosts`, and watches the connections to them.

links = [ssh(0, "a", environ=environ, cwd=cwd), near(1, "localhost", environ=environ, cwd=cwd)]
starter = SshStarter(links, events, hosts=2, timeout=300)
links[0].send(spec)
starter.listen()                      # in the event loop
await starter.end(together=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from phalanx.contract.variables import ERROR_FORMAT, TOKEN
from phalanx.errors import JoinError, LaunchError
from phalanx.forkserver import linux
from phalanx.launcher.remote.node_spec import NodeRefused
from phalanx.launcher.remote.ssh_errors import NO_FOLDER, NO_PYTHON, REMOTE_PYTHON, combined, explain, quoted
from phalanx.launcher.remote.ssh_link import SshLink

OPTIONS = {
    "BatchMode": "yes",  # no user could answer a prompt
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # Override settings in the user's configuration that do not suit a program.
    "ControlMaster": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
}

# Quoted once, for any shell: the variable parts follow as $1 and $2. -P: no file in that folder hides a module.
_REMOTE_SCRIPT = (
    f'cd -- "$1" 2>/dev/null || exit {NO_FOLDER}; [ -x "$2" ] || exit {NO_PYTHON}; exec "$2" -P -m phalanx node'
)

_COLLECT = 12.0  # seconds after the first failure, to report other failures with it
_POLL_INTERVAL = 0.5  # seconds
_END_TIMEOUT = 3.0  # seconds for a node to end by itself after node 0
_CUT_TIMEOUT = 10.0  # seconds for it to end its workers after its input was closed


class SshEvents(Protocol):
    """Callbacks of a starter."""

    def ready(self, link: SshLink) -> None:
        """Handle a host that is ready to take part."""

    def failed(self, error: JoinError) -> None:
        """Handle all hosts that cannot take part, once."""

    def ended(self, link: SshLink, code: int) -> None:
        """Handle the end of the child process of a ready host."""


class SshStarter:
    """Watches the links to all hosts, and reports which are ready, failed or ended."""

    def __init__(self, links: Sequence[SshLink], events: SshEvents, *, hosts: int, timeout: float) -> None:
        self.links = links
        self._events = events
        self._hosts = hosts  # in the run, this one included
        self._timeout = timeout  # seconds for a host to answer
        self._ended: dict[int, int] = {}  # node -> exit code
        self._ready: set[int] = set()
        self._first_trouble: float | None = None
        self._reported = False
        self._hurrying = False  # do not wait for nodes that wait for leftover processes
        self._watch: asyncio.Task[None] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of the child processes."""
        return frozenset(link.process.pid for link in self.links)

    def listen(self) -> None:
        """Start watching, in the event loop."""
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._poll())
        for link in self.links:
            link.listen(self._changed)

    def code(self, node: int) -> int | None:
        """Return the exit code of a node's child process, if it has ended."""
        return self._ended.get(node)

    async def _poll(self) -> None:
        start = time.monotonic()
        while True:
            for link in self.links:
                if not link.settled and time.monotonic() - start > self._timeout:
                    link.trouble = NodeRefused(
                        what=f"it has not answered for {self._timeout:.0f} s",
                        details=quoted(link.stderr),
                        fix=f"ssh {link.host} true shows whether its shell starts; --join-timeout sets the limit",
                    )
                self._changed(link)
            await asyncio.sleep(_POLL_INTERVAL)

    def _changed(self, link: SshLink) -> None:
        code = link.ended() if link.node not in self._ended else None
        if link.answer is not None and link.node not in self._ready:
            self._ready.add(link.node)
            self._events.ready(link)
        if code is not None:
            self._ended[link.node] = code
            if link.answer is None and link.trouble is None:
                link.trouble = explain(link, code)
            elif link.answer is not None:
                self._events.ended(link, code)
        self._report()

    def _report(self) -> None:
        """Report all failed hosts at once, so that the user can fix them together."""
        troubles = {link.host: link.trouble for link in self.links if link.trouble is not None}
        if not troubles or self._reported:
            return
        now = time.monotonic()
        self._first_trouble = self._first_trouble or now
        if all(link.settled for link in self.links) or now - self._first_trouble > _COLLECT:
            self._reported = True
            self._events.failed(combined(troubles, self._hosts))

    # -- the end

    async def end(self, *, together: bool, linger: float = 0.0) -> None:
        """Wait for all nodes to end. Close the input of those that do not, then kill their child processes.

        `together`: the nodes have joined, and end by themselves. `linger`: seconds that each may wait for processes
        that its ranks left running.
        """
        self._reported = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if together:
            await self._wait_exited(_END_TIMEOUT + linger, lambda: self._hurrying)
        for link in self.links:
            link.cut()
        await self._wait_exited(_CUT_TIMEOUT)
        self.close()

    def hurry(self) -> None:
        """Stop waiting for leftover processes."""
        self._hurrying = True

    async def _wait_exited(self, timeout: float, stop: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + timeout
        begun = [link for link in self.links if link.answer is not None]  # the others have started nothing
        while time.monotonic() < end and not stop() and any(link.process.poll() is None for link in begun):
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Kill the child processes. Processes on the hosts end when their input is closed."""
        for link in self.links:
            link.close()
            if link.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(link.process.pid, signal.SIGKILL)
                link.process.wait()


# -- child processes


def ssh(node: int, host: str, *, environ: Mapping[str, str], cwd: str) -> SshLink:
    """Start `phalanx node` on a host over ssh."""
    options = [option for name, value in OPTIONS.items() for option in ("-o", f"{name}={value}")]
    python = environ.get(REMOTE_PYTHON) or sys.executable
    line = ["ssh", "-T", "-x", *options, "--", host, command(cwd, python)]
    try:
        return SshLink(node, host, _spawn(line, environ), cwd=cwd, python=python, near=False)
    except FileNotFoundError:
        raise LaunchError(
            "--hosts needs ssh, which is not installed on this host",
            fix="install openssh-client, or start every node by hand: phalanx run -n 2 -i 0 --master HOST …",
        ) from None


def near(node: int, host: str, *, environ: Mapping[str, str], cwd: str) -> SshLink:
    """Start `phalanx node` on this host."""
    python = sys.executable
    line = [python, "-P", "-m", "phalanx", "node"]
    return SshLink(node, host, _spawn(line, environ), cwd=cwd, python=python, near=True)


def command(cwd: str, python: str) -> str:
    """Return the command line for the user's shell on the host, whichever it is."""
    return f"exec /bin/sh -c {shlex.quote(_REMOTE_SCRIPT)} phalanx {shlex.quote(cwd)} {shlex.quote(python)}"


def _spawn(line: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child in its own session, because Ctrl-C is ours. It dies with us."""
    parent = os.getpid()
    return subprocess.Popen(
        line,
        env={name: value for name, value in environ.items() if name not in (TOKEN, ERROR_FORMAT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=lambda: linux.die_with_parent(parent),  # noqa: PLW1509
    )
