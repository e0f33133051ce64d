"""What people see: whole lines of every rank, the bars of rank 0 alive below them, and what phalanx says.

A thread of its own reads the log files, as far as the pump has written them. However slow the terminal is, it
holds back nobody, costs no memory, and nothing is missing on it in the end.

On a terminal, rank 0 is live: it has a pseudo-terminal, and its unfinished rows (a prompt, a bar, several
bars) are an area at the bottom that is painted again below whatever else is printed. Rows are painted from
a model (`Lines`), never passed through, so that nothing of another rank lands in the middle of a sequence.
The model knows what bars are made of: return, newline, cursor up and down, erase; colours are text. While
nobody else has printed, a cursor that moves up reaches rows that are finished already, as on a terminal of
its own; after that they belong to the past, and the bars begin again below. While a debugger has the terminal,
what other ranks write waits in their logs, and what its own rank writes has no prefix. What needs the whole screen
(cursor addressing, the alternate screen) cannot be shared by ranks, and is dropped. The bytes of a world of one
rank pass unchanged.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.launch.output.filters import Std
from phalanx.launch.output.line_model import LineModel, columns
from phalanx.launch.output.log_tail import LogTail
from phalanx.launch.output.sink import Sink, attributes, restore

BATCH = 1 << 22  # gathered before it is written
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)

_SAID = 500  # lines of our own that are kept while nothing is shown
_PATIENCE = 5.0  # seconds for a terminal to take what there is

_MODES_SHARED = (b"25", b"2004")  # rank 0 may change these where it is not alone


@dataclass(frozen=True)
class _Loan:
    rank: int | None


@dataclass(frozen=True)
class _Veil:
    on: bool
    done: threading.Event


class Console:
    """`console = Console(world)`, then `say`, and an `Output` for what workers write; `close` at the end.

    `colour` and `terminal` are what to take for granted; None asks the two descriptors. The thread starts
    with the first thing to show, so that a process that has not shown anything may fork.
    """

    def __init__(
        self,
        world: int,
        *,
        out: int = 1,
        err: int = 2,
        colour: bool | None = None,
        terminal: bool | None = None,
        prefixes: Mapping[int, str] | None = None,
        quiet: float = 0.1,
        life: float = 10.0,
    ) -> None:
        self.lock = threading.RLock()
        self._prefixes = prefixes or {}
        self._alone = world == 1 and not self._prefixes
        self._digits = len(str(world - 1))
        self._colour = colour
        self._quiet = quiet  # after which an unfinished line is shown
        self._life = life  # between two signs of life of a bar without a terminal
        self._out = Sink(out, terminal=terminal)
        self._err = self._out if _same(out, err) else Sink(err, terminal=terminal)
        self._attributes = attributes((out, err, 0))
        self._wake = threading.Condition(self.lock)
        self._queue: deque[LogTail | str | bytes | _Loan | _Veil] = deque()
        self._borrower: int | None = None  # the rank whose debugger has the terminal
        self._later: list[LogTail] = []  # what there is to show once it is through
        self._said: deque[str] | None = None  # while nothing is shown: what is to be said afterwards
        self.hidden = False  # or about to be
        self._feeds: list[LogTail] = []
        self._live: list[LogTail] = []
        self._closing = False
        self._abandoned = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._status: str | None = None

    def settle(self, world: int, prefixes: Mapping[int, str]) -> None:
        """Before the first `attach`: how many ranks there are in the end, and what stands before their lines."""
        self._prefixes = prefixes
        self._digits = len(str(world - 1))

    def waiting(self, text: str | None) -> None:
        """A line at the bottom of a terminal that says what we wait for, until there is another one, or none."""
        with self.lock:
            if self._err.terminal and not self._closed and text != self._status:
                self._status = text
                self.ready("")

    def terminal(self, stream: Std) -> bool:
        """Whether this stream of ours is a terminal."""
        return self._sink(stream).terminal

    @property
    def together(self) -> bool:
        """Whether stdout and stderr of ours lead to one place, and so have one order."""
        return self._out is self._err

    def window(self, rank: int, stream: Std) -> tuple[int, int]:
        """Rows and columns that a rank's lines have: what their prefix takes is not theirs."""
        sink = self._sink(stream)
        rows, width = sink.size()
        return rows, max(width - columns(self._prefix(rank, sink)), 1) if width else 0

    def attach(self, rank: int, stream: Std, log: int | None, size: int, *, live: bool) -> LogTail:
        """Show what is appended to the log from here on."""
        sink = self._sink(stream)
        lines = None if self._alone else LineModel(live=live)
        feed = LogTail(self, sink, lines, None if log is None else os.dup(log), size)
        feed.rank, feed.prefix = rank, self._prefix(rank, sink)
        with self.lock:
            self._feeds.append(feed)
            if live and lines is not None:  # stdout is painted last: there a prompt is, and people type
                feed.live = True
                self._live.insert(0 if stream == Std.ERR else len(self._live), feed)
        return feed

    def renumber(self, feed: LogTail, rank: int) -> None:
        """Its lines are another rank's from here on."""
        with self.lock:
            feed.rank, feed.prefix = rank, self._prefix(rank, feed.sink)

    def lend(self, rank: int | None) -> None:
        """The terminal, to the debugger of a rank; None: it is through."""
        with self.lock:
            self.ready(_Loan(rank))

    def hide(self) -> None:
        """Write nothing to the terminal: somebody else draws there. Waits until all that came before is written.

        Meanwhile what ranks write is in their logs alone, and what we say is kept. A file or a pipe (`2>errors`) gets
        it as ever.
        """
        self.hidden = True
        done = threading.Event()
        with self.lock:
            self.ready(_Veil(True, done))
        done.wait(_PATIENCE)

    def show(self) -> None:
        """From here on, as before: what we have said meanwhile, and what ranks write next."""
        self.hidden = False
        with self.lock:
            self.ready(_Veil(False, threading.Event()))

    def debugger(self, data: bytes) -> None:
        """What the debugger writes."""
        with self.lock:
            self.ready(data)

    def typed(self) -> None:
        with self.lock:
            self._out.entered()
            self._err.entered()

    def say(self, text: str) -> None:
        """A line of our own, on stderr. Further lines of the text are details."""
        with self.lock:
            if self._closed:
                self._speak(text)
                self._err.flush([], 0.0)
            else:
                self.ready(text)

    def ready(self, item: LogTail | str | bytes | _Loan | _Veil) -> None:
        """There is something to show."""
        if isinstance(item, LogTail):
            if item.queued or self._abandoned:
                return
            item.queued = True
        self._queue.append(item)
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="console", daemon=True)
            self._thread.start()
        self._wake.notify()

    def abandon(self) -> None:
        """Show nothing more of the workers. From any thread, also while `close` waits."""
        with self.lock:
            self._abandoned = True
            self._out.abandoned = self._err.abandoned = True
            self._wake.notify()

    def close(self) -> None:
        """Returns when everything has been shown, however long that takes, and the terminal is as it was.

        It waits: from a coroutine, `await asyncio.to_thread(console.close)`.
        """
        with self.lock:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.2)
            if self._abandoned:
                break
        with self.lock:
            self._closed = True
            for sink in dict.fromkeys((self._out, self._err)):
                sink.leave()
            self._unveil()
            for item in self._queue:
                if isinstance(item, str) and item:  # our own last words are shown even if the rest is not
                    self._speak(item)
            self._queue.clear()
            if self._out.unwritten and not self.together:
                self._speak(f"{self._out.unwritten} bytes of output could not be written to stdout: the disk is full")
            self._err.flush([], 0.0)
            if self._thread is None:
                for feed in self._feeds:
                    feed.close()
        restore(self._attributes)

    def _sink(self, stream: Std) -> Sink:
        return self._out if stream == Std.OUT else self._err

    def _prefix(self, rank: int, sink: Sink) -> bytes:
        if self._alone:
            return b""
        if rank in self._prefixes:
            return self._prefixes[rank].encode(errors="replace")
        text = b"[%*d]" % (self._digits, rank)
        if sink.terminal if self._colour is None else self._colour:
            text = b"\x1b[%dm%b\x1b[0m" % (COLOURS[rank % len(COLOURS)], text)
        return text + b" "

    # -- in the thread

    def _run(self) -> None:
        while True:
            with self.lock:
                while not (self._queue or self._closing or self._abandoned):
                    due = self._due()
                    if due is not None and due <= 0:
                        break
                    self._wake.wait(due)
                if self._abandoned:
                    break
                batch = list(self._queue)
                self._queue.clear()
                last = self._closing and not batch and not self._later
            if self._closing and not batch:
                self._unveil()
                if self._later:
                    self._lend(None)
            for item in batch:
                if isinstance(item, str):
                    if item:
                        self._speak(item)
                elif isinstance(item, _Veil):
                    self._veil() if item.on else self._unveil()
                    item.done.set()
                elif self._said is not None:
                    self._pass_over(item)
                elif isinstance(item, bytes):
                    self._out.straight(item)
                elif isinstance(item, _Loan):
                    self._lend(item.rank)
                elif self._held(item):
                    self._later.append(item)
                else:
                    self._show(item)
                    if item.sink.waiting > BATCH:
                        self._flush()
            if last:
                for feed in list(self._feeds):
                    self._end(feed)
            self._lapse(time.monotonic())
            self._flush()
            if last:
                break
        for feed in self._feeds:
            feed.close()

    def _due(self) -> float | None:
        """Seconds until something is to be done although nothing comes."""
        times = [sink.repaint_at for sink in (self._out, self._err) if sink.late and not self._veiled(sink)]
        for feed in self._feeds:
            if self._held(feed):
                continue
            if feed.sign_at is not None:
                times.append(feed.sign_at)
            if feed.lines is not None and feed.lines.rest:
                times.append(feed.heard + feed.lines.rest * self._quiet)
        for feed in self._live if self._borrower is None and self._said is None else ():
            if feed.lines is not None and feed.lines.pending and not feed.showing:
                times.append(feed.heard + self._quiet)
        return min(times) - time.monotonic() if times else None

    def _lend(self, rank: int | None) -> None:
        """No area is painted meanwhile; what waited is shown afterwards."""
        self._borrower = rank
        for sink in dict.fromkeys((self._out, self._err)):
            self._gone_by(sink, None)
            sink.flush([], max(time.monotonic(), sink.repaint_at))
        if rank is None:
            with self.lock:
                self._queue.extend(self._later)
            self._later.clear()

    def _veil(self) -> None:
        for sink in dict.fromkeys((self._out, self._err)):
            self._gone_by(sink, None)
            sink.flush([], max(time.monotonic(), sink.repaint_at))
        self._said = self._said if self._said is not None else deque(maxlen=_SAID)

    def _unveil(self) -> None:
        if self._said is None:
            return
        said, self._said = self._said, None
        for feed in self._feeds:
            if feed.sink.terminal:
                feed.pass_over()
        for text in said:
            self._speak(text)

    def _veiled(self, sink: Sink) -> bool:
        return self._said is not None and sink.terminal

    def _pass_over(self, item: LogTail | bytes | _Loan) -> None:
        """What would be shown if anything were."""
        if isinstance(item, _Loan):
            self._borrower = item.rank
        elif isinstance(item, LogTail) and not item.sink.terminal:
            self._show(item)
        elif isinstance(item, LogTail) and item.pass_over() and item in self._feeds:
            with self.lock:
                self._feeds.remove(item)
                if item.live:
                    self._live.remove(item)
            item.close()

    def _held(self, feed: LogTail) -> bool:
        return self._borrower not in (None, feed.rank) or self._veiled(feed.sink)

    def _show(self, feed: LogTail) -> None:
        data, last = feed.take()
        if feed.lines is None:
            feed.sink.straight(data)
        elif data:
            self._read_on(feed, feed.lines, data)
        if last:
            self._end(feed)

    def _read_on(self, feed: LogTail, lines: LineModel, data: bytes) -> None:
        feed.heard = time.monotonic()
        if feed.live and self._borrower is None:
            self._leave_prompts(feed)
        done = lines.feed(data)
        if feed.live:
            for mode in lines.modes:
                if mode[3:-1] in _MODES_SHARED:
                    feed.sink.mode(mode)
            if self._borrower is None:
                feed.sink.reclaim(self._line(feed, line) for line in lines.reclaimed)
        lines.modes.clear()
        lines.reclaimed.clear()
        if done and feed.sign:
            done = done.removeprefix(feed.sign)
            feed.sign = b""
        self._put(feed, done)
        if feed.sink.terminal or not (lines.bar and lines.pending):
            feed.sign_at = None
        elif feed.sign_at is None:
            feed.sign_at = feed.heard + self._life

    def _leave_prompts(self, writer: LogTail) -> None:
        """A rank that writes to one stream does not wait at a prompt on the other."""
        for feed in self._live:
            if feed is writer or feed.sink is not writer.sink or feed.lines is None:
                continue
            if feed.showing and not feed.lines.bar:
                if feed.sink.waiting:
                    self._flush()
                if feed.sink.let_go(self._line(feed, feed.lines.states()[0])):
                    feed.lines.let_go()
                    feed.showing = False

    def _line(self, feed: LogTail, line: bytes) -> bytes:
        return self._rendered(feed, line + b"\n")[:-1]

    def _rendered(self, feed: LogTail, lines: bytes) -> bytes:
        if feed.sink.terminal and b"\x1b" in lines:
            lines = b"\n".join(map(_reset, lines.split(b"\n")))
        if not feed.prefix:
            return lines
        return feed.prefix + lines[:-1].replace(b"\n", b"\n" + feed.prefix) + b"\n"

    def _put(self, feed: LogTail, lines: bytes) -> None:
        if feed.noise is not None:
            lines = feed.noise.without(lines)
        if not lines:
            return
        self._gone_by(feed.sink, feed)
        if self._borrower is None:
            feed.sink.put(self._rendered(feed, lines))
        else:
            feed.sink.interject(lines)

    def _gone_by(self, sink: Sink, writer: LogTail | None) -> None:
        """Finished rows are out of reach once somebody else has written below them."""
        for feed in self._live:
            if feed is not writer and feed.sink is sink and feed.lines is not None:
                feed.lines.past.clear()

    def _speak(self, text: str) -> None:
        sink = self._err
        if self._said is not None and sink.terminal:
            self._said.append(text)
            return
        self._gone_by(sink, None)
        lines = f"phalanx: {text.rstrip()}\n"
        if sink.terminal:
            lines = _wrapped(lines, sink.size()[1] or 80)
        if self._alone or self._borrower is not None:
            sink.interject(lines.encode(errors="replace"))
        else:
            sink.put(lines.encode(errors="replace"))

    def _end(self, feed: LogTail) -> None:
        if feed not in self._feeds:
            return
        if feed.lines is not None:
            done = feed.lines.end()
            self._put(feed, done.removeprefix(feed.sign) if feed.sign else done)
        with self.lock:
            self._feeds.remove(feed)
            if feed.live:
                self._live.remove(feed)
        if feed.lines is None or feed.live:
            feed.sink.restore()  # now: what is said about its end must not be lost with the alternate screen
        if feed.skipped:
            self._speak(f"{feed.skipped} bytes of output could be neither kept nor shown")
        feed.close()

    def _lapse(self, now: float) -> None:
        for feed in list(self._feeds):
            if feed.lines is None or self._held(feed):
                continue
            rest = feed.lines.rest * self._quiet
            if feed.lines.rest and not feed.queued and now - feed.heard >= rest:
                self._put(feed, feed.lines.settle())
            if feed.sign_at is not None and now >= feed.sign_at:
                feed.sign_at = now + self._life
                sign = b"".join(state + b"\n" for state in feed.lines.states() if state)
                if sign != feed.sign:
                    feed.sign = sign
                    self._put(feed, sign)

    def _flush(self) -> None:
        now = time.monotonic()
        for sink in dict.fromkeys((self._out, self._err)):
            if not self._veiled(sink):
                sink.flush(self._area(sink, now), now)

    def _area(self, sink: Sink, now: float) -> list[bytes]:
        rows: list[bytes] = []
        if self._borrower is not None:
            return rows
        if self._status and sink is self._err:
            rows.append(f"phalanx: {self._status}"[: max((sink.size()[1] or 80) - 1, 20)].encode(errors="replace"))
        for feed in self._live:
            if feed.sink is not sink or feed.lines is None:
                continue
            quiet = not feed.queued and now - feed.heard >= self._quiet
            feed.showing = feed.lines.pending and (feed.lines.bar or feed.showing or quiet)
            if feed.showing:
                rows += [self._line(feed, state) if state else b"" for state in feed.lines.states()]
        return rows


def _same(one: int, other: int) -> bool:
    """Whether both lead to one place; then there is one order of what is written."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(one), os.fstat(other))
    return False


def _wrapped(lines: str, width: int) -> str:
    import textwrap

    return "".join(
        textwrap.fill(
            line,
            max(width - 1, 20),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        + "\n"
        for line in lines.splitlines()
    )


def _reset(line: bytes) -> bytes:
    """A colour ends with its line: the next one is somebody else's."""
    return line + b"\x1b[0m" if b"\x1b[" in line and not line.endswith((b"\x1b[0m", b"\x1b[m")) else line
