"""The connection to one host of `run --hosts`: a child process, messages to it, and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Callable

from phalanx.launcher.remote import node_spec
from phalanx.launcher.remote.node_spec import NodeRefused, Ready, SshMessage

_MOST_NOISE = 1 << 20  # bytes that a login shell may write before the answer
_STDERR = 40  # lines kept


class AnswerParser:
    """Finds the answer of `phalanx node` in the output of a host. A login shell may write before it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._buffer = bytearray()
        self._skipped = 0

    @property
    def rest(self) -> bytes:
        """Return the data after the answer."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> Ready | NodeRefused | None:
        """Process output. Return the answer, why there will be none, or None if it has not arrived yet."""
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._skipped += len(line)
            # The shell may have written an unfinished line before it.
            if (start := line.find(node_spec.MARK)) >= 0:
                return self._parse(line[start + len(node_spec.MARK) :])
        if self._skipped + len(self._buffer) > _MOST_NOISE:
            return NodeRefused(
                what="it keeps writing before phalanx can start",
                details=(f"the last of it: {bytes(self._buffer[-200:]).decode(errors='replace').strip()!r}",),
                fix=f"ssh {self._host} true should write nothing: check its shell startup files (.bashrc)",
            )
        return None

    def _parse(self, line: bytes) -> Ready | NodeRefused:
        try:
            return node_spec.from_node(line)
        except ValueError as error:
            return NodeRefused(
                what=f"its answer is not an answer of phalanx ({error})",
                fix=f"install the same version of phalanx on {self._host} as here",
            )


class SshLink:
    """One host: the child process that connects to it, and the data it has sent."""

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
        self.out: Callable[[bytes], None] = lambda _: None  # handles output after its answer
        self.err: Callable[[bytes], None] = lambda _: None
        self._send_buffer = bytearray()
        self._parser = AnswerParser(host)
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
        """Close its input: it then ends the processes that it has started."""
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
        message = self._parser.feed(data)
        if isinstance(message, Ready):
            self.answer = message
            if self._parser.rest:
                self.out(self._parser.rest)
        elif message is not None:
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
            # Not until end of file: a background process of ssh may keep them open.
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
