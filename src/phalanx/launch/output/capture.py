"""What workers write: from their pipes into their logs, every byte, at once. The console reads it there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import subprocess
import termios
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from phalanx.launch.output.console import Console
from phalanx.launch.output.filters import Duplicate, Std
from phalanx.launch.output.line_model import LineModel, plain
from phalanx.launch.output.log_forwarder import ForwarderThread, LogForwarder
from phalanx.launch.output.log_tail import LogTail
from phalanx.launch.output.noise import Noise

PIPE_SIZE = 1 << 20
_READS = 512  # a pipe is empty after two, but a pseudo-terminal gives a page at a time
TAIL_SIZE = 1 << 17
_MOST_REPEATED = 1 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
NAMES: tuple[tuple[Std, str], ...] = ((Std.OUT, "stdout"), (Std.ERR, "stderr"))


@dataclass(eq=False)
class CapturedStream:
    """One stream of one worker, or both where they are shown in one place."""

    rank: int
    std: Std
    path: str
    source: int  # our end
    target: int | None  # the worker's end, until it has it
    pty: bool
    log: int | None  # None: it could not even be opened
    start: int  # of this worker's part of the log
    size: int  # of the log
    ended: asyncio.Future[None]
    followers: list[LogTail | ForwarderThread] = field(default_factory=list)  # they read the log as it grows
    duplicate: Duplicate | None = None
    unkept: bytes = b""  # the end of what the log could not take
    repeated: bytes = b""  # the worker has started again, and writes this for a second time
    held: bytes = b""  # as far as it has: the beginning of `repeated`, from its last line on


class OutputCapture:
    """The output of one attempt: `open` before a worker starts, `handed_over` once it has, `drained` at its end.

    The pump is a callback of the event loop: one large read, one write. It never waits for the console.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, console: Console, *, relay: LogForwarder | None = None, echo: bool = True
    ) -> None:
        self._loop = loop
        self._console = console
        self._relay = relay
        self._echo = echo  # what is to be shown is shown here
        self._streams: dict[tuple[int, Std], CapturedStream] = {}
        self._buffer = memoryview(bytearray(PIPE_SIZE))
        self._lost = 0
        self._lost_path = ""
        self._needles: dict[Std, Collection[str]] = {}
        self._teed: Mapping[int, Std] | None = None
        self._headers: Mapping[int, str] = {}
        self._matches: dict[Std, int] = {}

    def duplicate(
        self,
        folder: str,
        *,
        stdout: Collection[str] = (),
        stderr: Collection[str] = (),
        teed: Mapping[int, Std] | None = None,
        headers: Mapping[int, str] | None = None,
    ) -> None:
        """Before `open`: lines that contain a needle go to folder/filtered_stdout.log, filtered_stderr.log.

        `teed` says which streams of a rank are searched (None: all), `headers` what stands before its lines.
        """
        self._teed = teed
        self._headers = headers or {}
        for (std, name), needles in zip(NAMES, (stdout, stderr), strict=True):
            if needles:
                self._needles[std] = needles
                self._matches[std] = _open_log(f"{folder}/filtered_{name}.log")

    def open(
        self, rank: int, folder: str, *, show: Std, terminal: bool = False, apart: bool = False
    ) -> tuple[int, int]:
        """Descriptors for a worker's stdout and stderr. With `terminal`, those that lead to one are one.

        Where both are shown in one place they are one stream, so that what is written to both keeps its order: all of
        it is in stdout.log then. `apart`: the user asked for a file of each.
        """
        for std, _ in NAMES:
            if (rank, std) in self._streams:  # its worker is replaced; something else may still hold its end
                self._forget(self._streams[rank, std])
        if show == Std.ALL and self._echo and self._console.together and not apart and not self._needles:
            both = self._open(rank, folder, Std.OUT, show=show, terminal=terminal)
            self._streams[rank, Std.ERR] = both
            with contextlib.suppress(OSError):
                os.close(_open_log(f"{folder}/{dict(NAMES)[Std.ERR]}.log"))
            streams = [both, both]
        else:
            streams = [self._open(rank, folder, std, show=show, terminal=terminal) for std, _ in NAMES]
        out, err = (stream.target for stream in streams)
        assert out is not None  # noqa: S101
        assert err is not None  # noqa: S101
        return out, err

    def _open(self, rank: int, folder: str, std: Std, *, show: Std, terminal: bool) -> CapturedStream:
        shown = bool(show & std)
        live = terminal and shown and self._echo and self._console.terminal(std) and not self._console.hidden
        path = f"{folder}/{dict(NAMES)[std]}.log"
        log: int | None = None
        try:
            log = _open_log(path)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._say_unkept(path, error)
        size = os.fstat(log).st_size if log is not None else 0
        source, target = os.openpty() if live else os.pipe()
        os.set_blocking(source, False)
        if live:
            _raw(target)
            _resize(target, self._console.window(rank, std))
        else:
            with contextlib.suppress(OSError):  # the user's share of pipe memory may be used up
                fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        stream = CapturedStream(rank, std, path, source, target, live, log, size, size, self._loop.create_future())
        if shown and self._echo:
            stream.followers.append(self._console.attach(rank, std, log, size, live=live))
        if shown and self._relay is not None:
            stream.followers.append(self._relay.follow(rank, std, log, size))
        if std in self._needles and (self._teed is None or self._teed.get(rank, Std.NONE) & std):
            stream.duplicate = Duplicate(self._needles[std], self._headers.get(rank, f"[{rank}]:"))
        self._streams[rank, std] = stream
        self._loop.add_reader(source, self._readable, stream)
        return stream

    def handed_over(self, rank: int) -> None:
        """The worker has its ends: ours are closed, so that its last exit is the end of the stream."""
        for stream in self._of([rank]):
            if stream.target is not None:
                os.close(stream.target)
                stream.target = None

    def repeats(self, rank: int) -> None:
        """Its worker begins again, in the same process: lines that it has written before are not kept twice."""
        self.catch_up(rank)
        for stream in self._of([rank]):
            if stream.log is not None and stream.size - stream.start <= _MOST_REPEATED:
                stream.repeated = os.pread(stream.log, stream.size - stream.start, stream.start)

    def regroups(self, rank: int) -> None:
        """Its worker can lose a peer and go on: what torch and NCCL print about that is not shown."""
        for stream in self._of([rank]):
            for follower in stream.followers:
                if isinstance(follower, LogTail) and follower.noise is None:
                    follower.noise = Noise()

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Living workers have other ranks now: old -> new."""
        ranks = {old: new for old, new in ranks.items() if old != new}
        moved = {key: stream for key, stream in self._streams.items() if key[0] in ranks}
        self._streams = {key: stream for key, stream in self._streams.items() if key not in moved}
        for (old, std), stream in moved.items():
            replaced = self._streams.get((ranks[old], std))  # of one that is dead
            if replaced is not None:
                self._forget(replaced)
            stream.rank = ranks[old]
            self._streams[stream.rank, std] = stream
            for follower in stream.followers:
                if isinstance(follower, LogTail):
                    self._console.renumber(follower, stream.rank)
                else:
                    follower.rank = stream.rank

    async def drained(self, timeout: float, ranks: Collection[int] | None = None) -> list[int]:
        """Wait for the end of all streams, or of these ranks'. Returns the ranks of which some process has
        kept one open for `timeout` seconds; nothing more is read from it."""
        streams = self._of(ranks)
        pending = [stream.ended for stream in streams if not stream.ended.done()]
        if pending:
            await asyncio.wait(pending, timeout=timeout)
        held = [stream for stream in streams if not stream.ended.done()]
        for stream in held:
            self._forget(stream)
        return sorted({stream.rank for stream in held})

    def catch_up(self, rank: int) -> None:
        """What a rank has written so far is kept, and on its way to the terminal."""
        for stream in self._of([rank]):
            for _ in range(_READS):  # and not as long as it goes on to write
                if stream.ended.done() or not self._pump(stream):
                    break

    def catch_up_all(self) -> None:
        for rank in {stream.rank for stream in self._streams.values()}:
            self.catch_up(rank)

    def leave(self) -> None:
        """Processes that go on without us may write: into the logs, or they would die of a pipe that nobody reads."""
        for stream in self._streams.values():
            if not stream.ended.done() and stream.log is not None:
                os.set_blocking(stream.source, True)
                subprocess.Popen(
                    ["cat"], stdin=stream.source, stdout=stream.log, stderr=subprocess.DEVNULL, start_new_session=True
                )
                self._end(stream)

    def tail(self, rank: int, stream: Literal["stdout", "stderr"], lines: int) -> list[str]:
        """The last lines as a reader would have seen them: plain text, bars in their last state."""
        std = Std.OUT if stream == "stdout" else Std.ERR
        found = self._streams.get((rank, std))
        if std == Std.OUT and found is self._streams.get((rank, Std.ERR)):  # one stream, told of as stderr
            return []
        if found is None:
            return []
        data = _last_bytes(found.path, found.size)
        if len(data) == TAIL_SIZE:  # most likely the middle of a line
            data = data[data.find(b"\n") + 1 :]
        model = LineModel()
        text = model.feed(data + found.unkept) + model.end()
        shown = [plain(line).rstrip() for line in text.split(b"\n")]
        while shown and not shown[-1]:
            shown.pop()
        return shown[-lines:] if lines > 0 else []

    def resized(self) -> list[int]:
        """Our terminal has a new size: so have the workers'. Returns the ranks that are to get a SIGWINCH:
        the kernel sends it only to those whose controlling terminal it is."""
        told = set()
        for stream in self._streams.values():
            if stream.pty and not stream.ended.done():
                _resize(stream.source, self._console.window(stream.rank, stream.std))
                told.add(stream.rank)
        return sorted(told)

    def close(self) -> None:
        for stream in self._streams.values():
            self._forget(stream)
        for fd in self._matches.values():
            os.close(fd)
        self._matches.clear()
        if self._lost:
            self._console.say(f"{self._lost} bytes of output could not be kept (first: {self._lost_path})")
            self._lost = 0

    def _of(self, ranks: Iterable[int] | None) -> list[CapturedStream]:
        chosen = None if ranks is None else set(ranks)
        streams = dict.fromkeys(self._streams.values())  # one for both is there twice
        return [stream for stream in streams if chosen is None or stream.rank in chosen]

    def _readable(self, stream: CapturedStream) -> None:
        if self._pump(stream) == 0:
            self._end(stream)

    def _pump(self, stream: CapturedStream) -> int | None:
        """One read. 0: the stream has ended. None: nothing there."""
        try:
            count = os.readv(stream.source, [self._buffer])
        except BlockingIOError:
            return None
        except OSError:  # EIO: the last process that had the pseudo-terminal has closed it
            return 0
        if count and stream.repeated:
            self._keep(stream, memoryview(_not_repeated(stream, bytes(self._buffer[:count]))))
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
            self._say_unkept(stream.path, error)
        stream.size += written
        if written:
            for follower in stream.followers:
                follower.grew(stream.size)
        if written < len(data):
            self._unkept(stream, bytes(data[written:]))
        elif stream.unkept:
            stream.unkept = b""  # there is room again
        if stream.duplicate is not None:
            self._match(stream.std, stream.duplicate.feed(bytes(data)))

    def _unkept(self, stream: CapturedStream, data: bytes) -> None:
        self._lost += len(data)
        stream.unkept = (stream.unkept + data)[-TAIL_SIZE:]  # the reason of a failure is in the last lines
        for follower in stream.followers:
            follower.unkept(data)

    def _say_unkept(self, path: str, error: OSError) -> None:
        if not self._lost_path:
            self._lost_path = path
            self._console.say(
                f"{path} cannot be written: {error.strerror}. The run goes on; output is shown, but not kept."
            )

    def _match(self, std: Std, lines: bytes) -> None:
        if lines:
            with contextlib.suppress(OSError):
                os.write(self._matches[std], lines)

    def _forget(self, stream: CapturedStream) -> None:
        """Take what is there, then close, whoever else has the other end."""
        if stream.ended.done():
            return
        for _ in range(_READS):
            if not self._pump(stream):
                break
        if not stream.ended.done():
            self._end(stream)

    def _end(self, stream: CapturedStream) -> None:
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
        if stream.duplicate is not None:
            self._match(stream.std, stream.duplicate.end())
        for follower in stream.followers:
            follower.end()
        stream.ended.set_result(None)


def _not_repeated(stream: CapturedStream, data: bytes) -> bytes:
    """What is new: from the first line on that differs. What may yet turn out to be the same line is held."""
    data = stream.held + data
    pairs = enumerate(zip(data, stream.repeated, strict=False))
    same = next((place for place, (new, old) in pairs if new != old), min(len(data), len(stream.repeated)))
    line = stream.repeated.rfind(b"\n", 0, same) + 1
    if same == len(stream.repeated):
        stream.repeated = stream.held = b""
        return data[same:]
    if same < len(data):
        stream.repeated = stream.held = b""
        return data[line:]
    stream.repeated, stream.held = stream.repeated[line:], data[line:]
    return b""


def _open_log(path: str) -> int:
    """To append to; and to read, for the console."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _raw(terminal: int) -> None:
    """Bytes come out as they went in: no carriage returns are added, nothing is echoed."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)


def _resize(terminal: int, window: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(terminal, window)


def _last_bytes(path: str, size: int) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(size - TAIL_SIZE, 0))
        return file.read(min(size, TAIL_SIZE))
    return b""
