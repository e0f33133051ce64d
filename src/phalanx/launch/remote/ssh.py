"""The starter's side of `run --hosts`: a child process a host, what is said to it, and what it means when it ends.

links = [ssh(0, "a", environ=environ, cwd=cwd), near(1, "localhost", environ=environ, cwd=cwd)]
starter = Starter(links, ears, hosts=2, patience=300)
links[0].tell(order)
starter.listen()                      # in the loop
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
from phalanx.launch.remote import node_spec
from phalanx.launch.remote.node_spec import NodeRefused, Ready, SshMessage
from phalanx.launch.runs.root_cause import in_words

REMOTE_PYTHON = "PHALANX_REMOTE_PYTHON"

OPTIONS = {
    "BatchMode": "yes",  # nobody could answer a question
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # What a user's configuration may want of every connection, and no other program's.
    "ControlMaster": "no",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
}

NO_FOLDER, NO_PYTHON, SSH_FAILED = 93, 94, 255
# Quoted once and for any shell: what differs comes behind it, as $1 and $2. -P: no file here hides a module.
_THERE = f'cd -- "$1" 2>/dev/null || exit {NO_FOLDER}; [ -x "$2" ] || exit {NO_PYTHON}; exec "$2" -P -m phalanx node'

_NOISE = 1 << 20  # bytes of a login shell's own before an answer
_STDERR = 40  # lines that are kept
_OTHERS = 12.0  # seconds from the first host that fails until it is told: what else fails is told with it
_LOOK = 0.5  # seconds between two looks at children that may have ended without a sound
_PARTING = 3.0  # seconds for a node to end by itself once node 0 has ended
_CUT = 10.0  # seconds for it to end its workers once it has been cut off


class SshLink:
    """One host: the child process that leads there, and what has come from it."""

    def __init__(
        self, node: int, host: str, process: subprocess.Popen[bytes], *, cwd: str, python: str, near: bool
    ) -> None:
        self.node = node
        self.host = host
        self.process = process
        self.cwd = cwd
        self.python = python
        self.near = near  # on this machine, without ssh
        self.answer: Ready | None = None
        self.trouble: NodeRefused | None = None
        self.stderr: deque[str] = deque(maxlen=_STDERR)
        self.out: Callable[[bytes], None] = lambda _: None  # what it writes behind its answer
        self.err: Callable[[bytes], None] = lambda _: None
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._skipped = 0
        self._line = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)

    @property
    def settled(self) -> bool:
        return self.answer is not None or self.trouble is not None

    # -- to it

    def tell(self, word: SshMessage) -> None:
        self._outbox += node_spec.encode(word)
        if self._loop is not None:
            self._write()

    def _write(self) -> None:
        stdin = self.process.stdin
        if stdin is None or stdin.closed or self._loop is None:
            return
        try:
            while self._outbox:
                del self._outbox[: os.write(stdin.fileno(), self._outbox)]
        except BlockingIOError:
            self._loop.add_writer(stdin.fileno(), self._write)
            return
        except OSError:  # it has ended: that is told by how it ended
            self._outbox.clear()
        self._loop.remove_writer(stdin.fileno())

    def cut(self) -> None:
        """It hears the end of its input, and ends what it has started."""
        stdin = self.process.stdin
        if stdin is not None and not stdin.closed:
            if self._loop is not None:
                self._loop.remove_writer(stdin.fileno())
            self._outbox.clear()
            stdin.close()

    # -- from it

    def listen(self, changed: Callable[[SshLink], None]) -> None:
        loop = self._loop = asyncio.get_running_loop()

        def hear(take: Callable[[bytes], None], fd: int) -> None:
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

        for stream, take in ((self.process.stdout, self._said), (self.process.stderr, self._complained)):
            if stream is not None:
                loop.add_reader(stream.fileno(), hear, take, stream.fileno())
        self._write()

    def _said(self, data: bytes) -> None:
        if self.settled:
            self.out(data)
            return
        self._inbox += data
        while not self.settled and (end := self._inbox.find(b"\n")) >= 0:
            line = bytes(self._inbox[:end])
            del self._inbox[: end + 1]
            self._skipped += len(line)
            # A shell may have left a line of its own unfinished.
            if (start := line.find(node_spec.MARK)) >= 0:
                self._answered(line[start + len(node_spec.MARK) :])
        if not self.settled and self._skipped + len(self._inbox) > _NOISE:
            self.trouble = NodeRefused(
                what="it writes without end before phalanx can begin",
                details=(f"the last of it: {bytes(self._inbox[-200:]).decode(errors='replace').strip()!r}",),
                fix=f"ssh {self.host} true should write nothing: look at what its shell does at the start (.bashrc)",
            )
        if self.answer is not None and self._inbox:
            self.out(bytes(self._inbox))
            self._inbox.clear()

    def _answered(self, line: bytes) -> None:
        try:
            word = node_spec.from_node(line)
        except ValueError as error:
            word = NodeRefused(
                what=f"it answers what is not an answer of phalanx ({error})", fix=_same_version(self.host)
            )
        if isinstance(word, Ready):
            self.answer = word
        else:
            self.trouble = word

    def _complained(self, data: bytes) -> None:
        if self.answer is not None:
            self.err(data)
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self.stderr += [line.decode(errors="replace").rstrip("\r")[:1000] for line in lines if line.strip()]
        self._line = rest[-4096:]

    def ended(self) -> int | None:
        """Its exit code, once it has one, and all that it wrote has been read."""
        code = self.process.poll()
        if code is None:
            return None
        for stream, take in ((self.process.stdout, self._said), (self.process.stderr, self._complained)):
            # Not until their end: whatever ssh has left in the background may hold them open.
            with contextlib.suppress(OSError, ValueError):
                while stream is not None and (data := os.read(stream.fileno(), 1 << 16)):
                    take(data)
        if self._line:
            self._complained(b"\n")
        return code

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                if self._loop is not None:
                    self._loop.remove_reader(stream.fileno())
                    self._loop.remove_writer(stream.fileno())
                stream.close()


class SshEvents(Protocol):
    def ready(self, link: SshLink) -> None:
        """A host has answered, and takes part."""

    def failed(self, error: JoinError) -> None:
        """These hosts do not take part: said once, with all of them."""

    def ended(self, link: SshLink, code: int) -> None:
        """The child of a host that took part has ended."""


class SshStarter:
    def __init__(self, links: Sequence[SshLink], ears: SshEvents, *, hosts: int, patience: float) -> None:
        self.links = links
        self._ears = ears
        self._hosts = hosts  # of the run, this one included
        self._patience = patience  # seconds for a host to answer
        self._ended: dict[int, int] = {}  # node -> exit code
        self._ready: set[int] = set()
        self._first_trouble: float | None = None
        self._told = False
        self._hurried = False  # nodes that wait for processes of their own are not waited for
        self._watch: asyncio.Task[None] | None = None

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(link.process.pid for link in self.links)

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watching())
        for link in self.links:
            link.listen(self._changed)

    def code(self, node: int) -> int | None:
        return self._ended.get(node)

    async def _watching(self) -> None:
        start = time.monotonic()
        while True:
            for link in self.links:
                if not link.settled and time.monotonic() - start > self._patience:
                    link.trouble = NodeRefused(
                        what=f"it has not answered in {self._patience:.0f} s",
                        details=_quoted(link.stderr),
                        fix=f"ssh {link.host} true shows whether its shell comes through; --join-timeout waits longer",
                    )
                self._changed(link)
            await asyncio.sleep(_LOOK)

    def _changed(self, link: SshLink) -> None:
        code = link.ended() if link.node not in self._ended else None
        if link.answer is not None and link.node not in self._ready:
            self._ready.add(link.node)
            self._ears.ready(link)
        if code is not None:
            self._ended[link.node] = code
            if link.answer is None and link.trouble is None:
                link.trouble = explain(link, code)
            elif link.answer is not None:
                self._ears.ended(link, code)
        self._judge()

    def _judge(self) -> None:
        """All that fail, at once: who has to fix two hosts shall not learn of the second one after the first."""
        troubles = {link.host: link.trouble for link in self.links if link.trouble is not None}
        if not troubles or self._told:
            return
        now = time.monotonic()
        self._first_trouble = self._first_trouble or now
        if all(link.settled for link in self.links) or now - self._first_trouble > _OTHERS:
            self._told = True
            self._ears.failed(combined(troubles, self._hosts))

    # -- the end

    async def end(self, *, together: bool, linger: float = 0.0) -> None:
        """Nodes that have come together end by themselves. One that does not is cut off, and then killed.

        `linger`: how long each may wait for processes that its ranks left running.
        """
        self._told = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if together:
            await self._gone(_PARTING + linger, lambda: self._hurried)
        for link in self.links:
            link.cut()
        await self._gone(_CUT)
        self.close()

    def hurry(self) -> None:
        self._hurried = True

    async def _gone(self, patience: float, stop: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + patience
        begun = [link for link in self.links if link.answer is not None]  # the others have nothing to end
        while time.monotonic() < end and not stop() and any(link.process.poll() is None for link in begun):
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """At once. What runs on the hosts ends by itself, for its input has ended."""
        for link in self.links:
            link.close()
            if link.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(link.process.pid, signal.SIGKILL)
                link.process.wait()


# -- children


def ssh(node: int, host: str, *, environ: Mapping[str, str], cwd: str) -> SshLink:
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    python = environ.get(REMOTE_PYTHON) or sys.executable
    line = ["ssh", "-T", "-x", *options, "--", host, command(cwd, python)]
    try:
        return SshLink(node, host, _spawn(line, environ), cwd=cwd, python=python, near=False)
    except FileNotFoundError:
        raise LaunchError(
            "there is no ssh on this machine, and --hosts needs it",
            fix="install openssh-client, or start every node by hand: phalanx run -n 2 -i 0 --master HOST …",
        ) from None


def near(node: int, host: str, *, environ: Mapping[str, str], cwd: str) -> SshLink:
    """A node on this very machine."""
    python = sys.executable
    line = [python, "-P", "-m", "phalanx", "node"]
    return SshLink(node, host, _spawn(line, environ), cwd=cwd, python=python, near=True)


def command(cwd: str, python: str) -> str:
    """For the shell of the user there, whichever it is."""
    return f"exec /bin/sh -c {shlex.quote(_THERE)} phalanx {shlex.quote(cwd)} {shlex.quote(python)}"


def _spawn(line: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own, for Ctrl-C is ours; and it dies with us."""
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


# -- in words


def explain(link: SshLink, code: int) -> NodeRefused:
    """Why a child has ended before its host has answered."""
    host, said = link.host, _quoted(link.stderr)
    text = "\n".join(link.stderr)
    if code == SSH_FAILED and not link.near:
        return NodeRefused(what="ssh does not get there", details=said, fix=_remedy(host, text))
    if code == NO_FOLDER:
        return NodeRefused(
            what="there is no such folder as the one that you are in",
            details=(f"expected {link.cwd} there too",),
            fix="copy it there, or work in a folder that all hosts share",
        )
    if code == NO_PYTHON:
        return NodeRefused(
            what="there is no such Python",
            details=(f"expected {link.python}, as here",),
            fix=f"install it there too, or export {REMOTE_PYTHON}=/path/to/python, the same for all other hosts",
        )
    if re.search(r"No module named '?phalanx\b", text):
        install = f"{link.python} -m pip install phalanx"
        return NodeRefused(what="phalanx is not installed there", details=said, fix=f"ssh {host} {install}")
    return NodeRefused(
        what=f"phalanx node has ended before it could answer: {in_words(code)}",
        details=said,
        fix=f"ssh {host} true shows whether its shell works" if not said else "",
    )


def last_words(link: SshLink, code: int) -> NodeRefused:
    """Why a child has ended although its host had answered."""
    lines = [line.removeprefix("phalanx: ") for line in link.stderr]
    if code == SSH_FAILED and not link.near:
        what = "the ssh connection has ended" if lines else "ssh has ended: phalanx was killed there, or it was cut"
        return NodeRefused(what=what, details=_quoted(link.stderr))
    if not lines:
        return NodeRefused(what=f"phalanx has ended there: {in_words(code)}")
    fix = next((line.strip().removeprefix("fix: ") for line in lines if line.strip().startswith("fix: ")), "")
    return NodeRefused(
        what=lines[0],
        details=tuple(line.strip() for line in lines[1:] if not line.strip().startswith("fix: ")),
        fix=fix,
    )


def combined(troubles: Mapping[str, NodeRefused], hosts: int = 1) -> JoinError:
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
        return f"ssh-copy-id {host}, so that ssh {host} true asks for no password"
    if "Host key verification failed" in text or "IDENTIFICATION HAS CHANGED" in text:
        return f"ssh {host} true, once by hand, and compare the key that it shows"
    if "Could not resolve" in text:
        return f"correct the name, or make it known in /etc/hosts or ~/.ssh/config; ssh {host} true shows the same"
    return f"ssh {host} true shows the same: is the host up, and does sshd run there?"


def _quoted(lines: Sequence[str] | deque[str]) -> tuple[str, ...]:
    return tuple(list(lines)[-8:])


def _same_version(host: str) -> str:
    return f"install the same version of phalanx on {host} as here"
