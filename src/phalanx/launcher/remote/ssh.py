"""The starter's side of `run --hosts`: one child process per host, messages to it, and why it ended.

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
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from phalanx.contract.variables import ERROR_FORMAT, TOKEN
from phalanx.errors import JoinError, LaunchError
from phalanx.forkserver import linux
from phalanx.launcher.remote import node_spec
from phalanx.launcher.remote.node_spec import NodeRefused, Ready, SshMessage
from phalanx.launcher.runs.root_cause import in_words

REMOTE_PYTHON = "PHALANX_REMOTE_PYTHON"

OPTIONS = {
    "BatchMode": "yes",  # nobody could answer a prompt
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # Override settings in the user's configuration that do not suit a program.
    "ControlMaster": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
}

NO_FOLDER, NO_PYTHON, SSH_FAILED = 93, 94, 255
# Quoted once, for any shell: the variable parts follow as $1 and $2. -P: no file in that folder hides a module.
_REMOTE_SCRIPT = (
    f'cd -- "$1" 2>/dev/null || exit {NO_FOLDER}; [ -x "$2" ] || exit {NO_PYTHON}; exec "$2" -P -m phalanx node'
)

_MOST_NOISE = 1 << 20  # bytes that a login shell may write before the answer
_STDERR = 40  # lines kept
_COLLECT = 12.0  # seconds after the first failure, to report other failures with it
_POLL_INTERVAL = 0.5  # seconds
_END_TIMEOUT = 3.0  # seconds for a node to end by itself after node 0
_CUT_TIMEOUT = 10.0  # seconds for it to end its workers after its input was closed


class SshLink:
    """One host: the child process that connects to it, and what it has sent."""

    def __init__(
        self, node: int, host: str, process: subprocess.Popen[bytes], *, cwd: str, python: str, near: bool
    ) -> None:
        self.node = node
        self.host = host
        self.process = process
        self.cwd = cwd
        self.python = python
        self.near = near  # on this host, without ssh
        self.answer: Ready | None = None
        self.trouble: NodeRefused | None = None
        self.stderr: deque[str] = deque(maxlen=_STDERR)
        self.out: Callable[[bytes], None] = lambda _: None  # takes what it writes after its answer
        self.err: Callable[[bytes], None] = lambda _: None
        self._send_buffer = bytearray()
        self._receive_buffer = bytearray()
        self._skipped = 0
        self._line = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)

    @property
    def settled(self) -> bool:
        """Return whether the host has answered or failed."""
        return self.answer is not None or self.trouble is not None

    # -- sending

    def send(self, message: SshMessage) -> None:
        """Send a message, as soon as possible."""
        self._send_buffer += node_spec.encode(message)
        if self._loop is not None:
            self._write()

    def _write(self) -> None:
        stdin = self.process.stdin
        if stdin is None or stdin.closed or self._loop is None:
            return
        try:
            while self._send_buffer:
                del self._send_buffer[: os.write(stdin.fileno(), self._send_buffer)]
        except BlockingIOError:
            self._loop.add_writer(stdin.fileno(), self._write)
            return
        except OSError:  # it has ended: its exit code says why
            self._send_buffer.clear()
        self._loop.remove_writer(stdin.fileno())

    def cut(self) -> None:
        """Close its input, on which it ends what it has started."""
        stdin = self.process.stdin
        if stdin is not None and not stdin.closed:
            if self._loop is not None:
                self._loop.remove_writer(stdin.fileno())
            self._send_buffer.clear()
            stdin.close()

    # -- receiving

    def listen(self, changed: Callable[[SshLink], None]) -> None:
        """Start reading in the event loop. `changed` is called after every read."""
        loop = self._loop = asyncio.get_running_loop()

        def read(take: Callable[[bytes], None], fd: int) -> None:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                take(data)
            else:
                loop.remove_reader(fd)
            changed(self)

        for stream, take in ((self.process.stdout, self._read_stdout), (self.process.stderr, self._read_stderr)):
            if stream is not None:
                loop.add_reader(stream.fileno(), read, take, stream.fileno())
        self._write()

    def _read_stdout(self, data: bytes) -> None:
        if self.settled:
            self.out(data)
            return
        self._receive_buffer += data
        while not self.settled and (end := self._receive_buffer.find(b"\n")) >= 0:
            line = bytes(self._receive_buffer[:end])
            del self._receive_buffer[: end + 1]
            self._skipped += len(line)
            # The shell may have written an unfinished line before it.
            if (start := line.find(node_spec.MARK)) >= 0:
                self._parse_answer(line[start + len(node_spec.MARK) :])
        if not self.settled and self._skipped + len(self._receive_buffer) > _MOST_NOISE:
            self.trouble = NodeRefused(
                what="it keeps writing before phalanx can start",
                details=(f"the last of it: {bytes(self._receive_buffer[-200:]).decode(errors='replace').strip()!r}",),
                fix=f"ssh {self.host} true should write nothing: check its shell startup files (.bashrc)",
            )
        if self.answer is not None and self._receive_buffer:
            self.out(bytes(self._receive_buffer))
            self._receive_buffer.clear()

    def _parse_answer(self, line: bytes) -> None:
        try:
            message = node_spec.from_node(line)
        except ValueError as error:
            message = NodeRefused(
                what=f"its answer is not an answer of phalanx ({error})", fix=_same_version(self.host)
            )
        if isinstance(message, Ready):
            self.answer = message
        else:
            self.trouble = message

    def _read_stderr(self, data: bytes) -> None:
        if self.answer is not None:
            self.err(data)
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self.stderr += [line.decode(errors="replace").rstrip("\r")[:1000] for line in lines if line.strip()]
        self._line = rest[-4096:]

    def ended(self) -> int | None:
        """Return its exit code after reading all its output. None: it is running."""
        code = self.process.poll()
        if code is None:
            return None
        for stream, take in ((self.process.stdout, self._read_stdout), (self.process.stderr, self._read_stderr)):
            # Not until end of file: a process that ssh left in the background may hold them open.
            with contextlib.suppress(OSError, ValueError):
                while stream is not None and (data := os.read(stream.fileno(), 1 << 16)):
                    take(data)
        if self._line:
            self._read_stderr(b"\n")
        return code

    def close(self) -> None:
        """Close the pipes."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                if self._loop is not None:
                    self._loop.remove_reader(stream.fileno())
                    self._loop.remove_writer(stream.fileno())
                stream.close()


class SshEvents(Protocol):
    """Callbacks of a starter."""

    def ready(self, link: SshLink) -> None:
        """Called when a host is ready to take part."""

    def failed(self, error: JoinError) -> None:
        """Called once, with all hosts that cannot take part."""

    def ended(self, link: SshLink, code: int) -> None:
        """Called when the child process of a ready host has ended."""


class SshStarter:
    """Watches the links to all hosts, and reports who is ready, who failed and who ended."""

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
                        details=_quoted(link.stderr),
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
        """Kill the child processes. What runs on the hosts ends when its input is closed."""
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


# -- error messages


def explain(link: SshLink, code: int) -> NodeRefused:
    """Return why a child process ended before its host answered."""
    host, quoted = link.host, _quoted(link.stderr)
    text = "\n".join(link.stderr)
    if code == SSH_FAILED and not link.near:
        return NodeRefused(what="ssh cannot connect", details=quoted, fix=_remedy(host, text))
    if code == NO_FOLDER:
        return NodeRefused(
            what="the current folder does not exist there",
            details=(f"expected {link.cwd}",),
            fix="copy it there, or work in a folder on a shared disk",
        )
    if code == NO_PYTHON:
        return NodeRefused(
            what="no such Python",
            details=(f"expected {link.python}, as here",),
            fix=f"install it there too, or export {REMOTE_PYTHON}=/path/to/python, the same for all other hosts",
        )
    if re.search(r"No module named '?phalanx\b", text):
        install = f"{link.python} -m pip install phalanx"
        return NodeRefused(what="phalanx is not installed there", details=quoted, fix=f"ssh {host} {install}")
    return NodeRefused(
        what=f"phalanx node ended before it could answer: {in_words(code)}",
        details=quoted,
        fix=f"ssh {host} true shows whether its shell works" if not quoted else "",
    )


def explain_end(link: SshLink, code: int) -> NodeRefused:
    """Return why a child process ended after its host had answered."""
    lines = [line.removeprefix("phalanx: ") for line in link.stderr]
    if code == SSH_FAILED and not link.near:
        what = "the ssh connection ended" if lines else "ssh ended: phalanx was killed there, or the connection was cut"
        return NodeRefused(what=what, details=_quoted(link.stderr))
    if not lines:
        return NodeRefused(what=f"phalanx ended there: {in_words(code)}")
    fix = next((line.strip().removeprefix("fix: ") for line in lines if line.strip().startswith("fix: ")), "")
    return NodeRefused(
        what=lines[0],
        details=tuple(line.strip() for line in lines[1:] if not line.strip().startswith("fix: ")),
        fix=fix,
    )


def combined(troubles: Mapping[str, NodeRefused], hosts: int = 1) -> JoinError:
    """Combine the failures of several hosts into one error."""
    by_host = {
        host: JoinError(trouble.what, details=trouble.details, fix=trouble.fix) for host, trouble in troubles.items()
    }
    if len(troubles) == 1:
        ((host, trouble),) = troubles.items()
        return JoinError(f"{host}: {trouble.what}", details=trouble.details, fix=trouble.fix, by_host=by_host)
    details = []
    for host, trouble in troubles.items():
        details.append(f"{host}: {trouble.what}")
        details += [f"  {line}" for line in trouble.details]
        if trouble.fix:
            details.append(f"  fix: {trouble.fix}")
    return JoinError(f"{len(troubles)} of {hosts} hosts cannot take part", details=details, by_host=by_host)


def _remedy(host: str, text: str) -> str:
    if "Permission denied" in text:
        return f"ssh-copy-id {host}, so that ssh {host} true does not ask for a password"
    if "Host key verification failed" in text or "IDENTIFICATION HAS CHANGED" in text:
        return f"run ssh {host} true once by hand, and compare the key that it shows"
    if "Could not resolve" in text:
        return f"correct the name, or add it to /etc/hosts or ~/.ssh/config; ssh {host} true shows the same"
    return f"ssh {host} true shows the same: is the host up, and does sshd run there?"


def _quoted(lines: Sequence[str] | deque[str]) -> tuple[str, ...]:
    return tuple(list(lines)[-8:])


def _same_version(host: str) -> str:
    return f"install the same version of phalanx on {host} as here"
