"""Copies captured streams into their logs, in callbacks of the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from phalanx.launcher.output.captured_stream import TAIL_SIZE, CapturedStream
from phalanx.launcher.output.filtered_logs import FilteredLogs

PIPE_SIZE = 1 << 20
_READS = 512  # two reads empty a pipe, but a pseudo-terminal returns one page at a time


class LostOutput:
    """Output that could not be written to a log. Reports it once, and the amount at the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._path = ""  # of the first log that could not be written
        self.count = 0  # bytes

    def failed(self, path: str, error: OSError) -> None:
        """Report that a log cannot be written, if it is the first."""
        if not self._path:
            self._path = path
            self._say(f"{path} cannot be written: {error.strerror}. The run continues; output is shown but not kept.")

    def report(self) -> None:
        """Report the number of bytes lost since the last report."""
        if self.count:
            self._say(f"{self.count} bytes of output could not be written to logs (first: {self._path})")
            self.count = 0


class StreamCopier:
    """Copies streams of workers into their logs: one large read and one write at a time, into one buffer.

    `filtered` receives the lines that users asked to have duplicated. None: there are none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lost: LostOutput) -> None:
        self.lost = lost
        self.filtered: FilteredLogs | None = None
        self._loop = loop
        self._buffer = memoryview(bytearray(PIPE_SIZE))

    def start(self, stream: CapturedStream) -> None:
        """Copy the stream whenever it is readable, until it ends."""
        self._loop.add_reader(stream.source, self._readable, stream)

    def catch_up(self, stream: CapturedStream) -> None:
        """Copy the output of the stream so far."""
        for _ in range(_READS):  # bounded: it may write endlessly
            if stream.ended.done() or not self._pump(stream):
                break

    def _readable(self, stream: CapturedStream) -> None:
        if self._pump(stream) == 0:
            self.end(stream)

    def _pump(self, stream: CapturedStream) -> int | None:
        """Read once. Return 0 at the end of the stream, None if there is nothing to read."""
        try:
            count = os.readv(stream.source, [self._buffer])
        except BlockingIOError:
            return None
        except OSError:  # EIO: the last process with the pseudo-terminal has closed it
            return 0
        if count and stream.repeated:
            self._keep(stream, memoryview(stream.not_repeated(bytes(self._buffer[:count]))))
        elif count:
            self._keep(stream, self._buffer[:count])
        return count

    def _keep(self, stream: CapturedStream, data: memoryview) -> None:
        written = 0
        try:
            if stream.log is not None:
                while written < len(data):
                    written += os.write(stream.log, data[written:])
        except OSError as error:
            self.lost.failed(stream.path, error)
        stream.size += written
        if written:
            for follower in stream.followers:
                follower.grew(stream.size)
        if written < len(data):
            self._unkept(stream, bytes(data[written:]))
        elif stream.unkept:
            stream.unkept = b""  # the disk has room again
        if self.filtered is not None and stream.duplicate is not None:
            self.filtered.write(stream.std, stream.duplicate.feed(bytes(data)))

    def _unkept(self, stream: CapturedStream, data: bytes) -> None:
        self.lost.count += len(data)
        stream.unkept = (stream.unkept + data)[-TAIL_SIZE:]  # the last lines contain the reason of a failure
        for follower in stream.followers:
            follower.unkept(data)

    def close(self, stream: CapturedStream) -> None:
        """Copy the available output, then close the stream, even if another process has the other end open."""
        if stream.ended.done():
            return
        self.catch_up(stream)
        if not stream.ended.done():
            self.end(stream)

    def end(self, stream: CapturedStream) -> None:
        """Close the stream, its log and the readers of the log."""
        if stream.held:
            self._keep(stream, memoryview(stream.held))
        self._loop.remove_reader(stream.source)
        os.close(stream.source)
        if stream.target is not None:
            os.close(stream.target)
            stream.target = None
        if stream.log is not None:
            os.close(stream.log)
            stream.log = None
        if self.filtered is not None and stream.duplicate is not None:
            self.filtered.write(stream.std, stream.duplicate.end())
        for follower in stream.followers:
            follower.end()
        stream.ended.set_result(None)
