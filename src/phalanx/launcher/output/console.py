"""Shows the output of all ranks: whole lines of every rank, the progress bars of rank 0 below, and phalanx's messages.

A thread reads the log files as they grow. A slow terminal delays nobody, costs no memory and misses nothing.

On a terminal, rank 0 is live: it has a pseudo-terminal, and its unfinished rows (a prompt, one or more bars) form an
area at the bottom that is repainted below other output. Rows are painted from a `LineModel` and never passed through,
so that nothing of another rank lands within an escape sequence. The model understands what bars use: return, newline,
cursor up and down, erase; colours are text. As long as nobody else has printed, a cursor that moves up reaches
finished rows too, as on a terminal; after that they are final, and the bars start again below. While a debugger has
the terminal, output of other ranks waits in their logs, and the debugged rank has no prefix. What needs the whole
screen (cursor addressing, the alternate screen) cannot be shared by ranks and is dropped. The output of a single rank
passes unchanged.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.launcher.output.filters import Std
from phalanx.launcher.output.line_model import LineModel, columns
from phalanx.launcher.output.log_tail import LogTail
from phalanx.launcher.output.sink import Sink, attributes, restore

BATCH = 1 << 22  # bytes collected before they are written
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)

_MOST_MESSAGES = 500  # of phalanx, kept while the console is hidden
_HIDE_TIMEOUT = 5.0  # seconds for the terminal to accept pending output

_MODES_SHARED = (b"25", b"2004")  # that rank 0 may change when there are other ranks


@dataclass(frozen=True)
class _Loan:
    rank: int | None


@dataclass(frozen=True)
class _Visibility:
    on: bool
    done: threading.Event


class Console:
    """Create it with the world size, then call `say`, and `attach` for each stream of a worker; `close` at the end.

    `colour` and `terminal` override what the descriptors say. The thread starts with the first output, so that a
    process that has shown nothing may fork.
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
        bar_interval: float = 10.0,
    ) -> None:
        self.lock = threading.RLock()
        self._prefixes = prefixes or {}
        self._alone = world == 1 and not self._prefixes
        self._digits = len(str(world - 1))
        self._colour = colour
        self._quiet = quiet  # seconds after which an unfinished line is shown
        self._bar_interval = bar_interval  # seconds between two states of a bar where there is no terminal
        self._out = Sink(out, terminal=terminal)
        self._err = self._out if _same(out, err) else Sink(err, terminal=terminal)
        self._attributes = attributes((out, err, 0))
        self._wake = threading.Condition(self.lock)
        self._queue: deque[LogTail | str | bytes | _Loan | _Visibility] = deque()
        self._debugged: int | None = None  # the rank whose debugger has the terminal
        self._deferred: list[LogTail] = []  # to be shown when it ends
        self._held_messages: deque[str] | None = None  # while hidden: messages to print afterwards
        self.hidden = False  # or about to be hidden
        self._tails: list[LogTail] = []
        self._live: list[LogTail] = []
        self._closing = False
        self._abandoned = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._status: str | None = None

    def settle(self, world: int, prefixes: Mapping[int, str]) -> None:
        """Set the final number of ranks and the prefixes of their lines. Call it before the first `attach`."""
        self._prefixes = prefixes
        self._digits = len(str(world - 1))

    def waiting(self, text: str | None) -> None:
        """Show a status line at the bottom of a terminal, until the next call. None removes it."""
        with self.lock:
            if self._err.terminal and not self._closed and text != self._status:
                self._status = text
                self.ready("")

    def terminal(self, stream: Std) -> bool:
        """Return whether our stdout or stderr is a terminal."""
        return self._sink(stream).terminal

    @property
    def together(self) -> bool:
        """Return whether our stdout and stderr lead to the same place, and so have one order."""
        return self._out is self._err

    def window(self, rank: int, stream: Std) -> tuple[int, int]:
        """Return the rows and columns available to a rank, without its prefix."""
        sink = self._sink(stream)
        rows, width = sink.size()
        return rows, max(width - columns(self._prefix(rank, sink)), 1) if width else 0

    def attach(self, rank: int, stream: Std, log: int | None, size: int, *, live: bool) -> LogTail:
        """Show what is appended to the log from here on."""
        sink = self._sink(stream)
        lines = None if self._alone else LineModel(live=live)
        tail = LogTail(self, sink, lines, None if log is None else os.dup(log), size)
        tail.rank, tail.prefix = rank, self._prefix(rank, sink)
        with self.lock:
            self._tails.append(tail)
            if live and lines is not None:  # stdout is painted last: a prompt is there, and users type
                tail.live = True
                self._live.insert(0 if stream == Std.ERR else len(self._live), tail)
        return tail

    def renumber(self, tail: LogTail, rank: int) -> None:
        """Label further lines with another rank."""
        with self.lock:
            tail.rank, tail.prefix = rank, self._prefix(rank, tail.sink)

    def lend(self, rank: int | None) -> None:
        """Lend the terminal to the debugger of a rank. None takes it back."""
        with self.lock:
            self.ready(_Loan(rank))

    def hide(self) -> None:
        """Write nothing to the terminal, which another process uses. Returns when all earlier output is written.

        Meanwhile output of ranks is only in their logs, and messages are kept. A file or pipe (`2>errors`) is not
        affected.
        """
        self.hidden = True
        done = threading.Event()
        with self.lock:
            self.ready(_Visibility(True, done))
        done.wait(_HIDE_TIMEOUT)

    def show(self) -> None:
        """Undo `hide`: print the kept messages, and show further output."""
        self.hidden = False
        with self.lock:
            self.ready(_Visibility(False, threading.Event()))

    def debugger(self, data: bytes) -> None:
        """Write output of the debugger."""
        with self.lock:
            self.ready(data)

    def typed(self) -> None:
        """Note that the user pressed Enter, which moves the cursor to a new line."""
        with self.lock:
            self._out.entered()
            self._err.entered()

    def say(self, text: str) -> None:
        """Print a message of phalanx on stderr. Further lines of the text are details."""
        with self.lock:
            if self._closed:
                self._print(text)
                self._err.flush([], 0.0)
            else:
                self.ready(text)

    def ready(self, item: LogTail | str | bytes | _Loan | _Visibility) -> None:
        """Queue something to show."""
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
        """Show no more output of workers. Can be called from any thread, also while `close` waits."""
        with self.lock:
            self._abandoned = True
            self._out.abandoned = self._err.abandoned = True
            self._wake.notify()

    def close(self) -> None:
        """Show everything, however long that takes, and restore the terminal.

        It blocks: from a coroutine, `await asyncio.to_thread(console.close)`.
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
            self._unhide()
            for item in self._queue:
                if isinstance(item, str) and item:  # messages are printed even if output is abandoned
                    self._print(item)
            self._queue.clear()
            if self._out.unwritten and not self.together:
                self._print(f"{self._out.unwritten} bytes of output could not be written to stdout: the disk is full")
            self._err.flush([], 0.0)
            if self._thread is None:
                for tail in self._tails:
                    tail.close()
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

    # -- the thread

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
                last = self._closing and not batch and not self._deferred
            if self._closing and not batch:
                self._unhide()
                if self._deferred:
                    self._lend(None)
            for item in batch:
                if isinstance(item, str):
                    if item:
                        self._print(item)
                elif isinstance(item, _Visibility):
                    self._hide() if item.on else self._unhide()
                    item.done.set()
                elif self._held_messages is not None:
                    self._skip(item)
                elif isinstance(item, bytes):
                    self._out.straight(item)
                elif isinstance(item, _Loan):
                    self._lend(item.rank)
                elif self._is_held(item):
                    self._deferred.append(item)
                else:
                    self._show(item)
                    if item.sink.waiting > BATCH:
                        self._flush()
            if last:
                for tail in list(self._tails):
                    self._end(tail)
            self._tick(time.monotonic())
            self._flush()
            if last:
                break
        for tail in self._tails:
            tail.close()

    def _due(self) -> float | None:
        """Return the seconds until the next timed action, or None."""
        times = [sink.repaint_at for sink in (self._out, self._err) if sink.late and not self._is_hidden(sink)]
        for tail in self._tails:
            if self._is_held(tail):
                continue
            if tail.bar_due is not None:
                times.append(tail.bar_due)
            if tail.lines is not None and tail.lines.rest:
                times.append(tail.last_data + tail.lines.rest * self._quiet)
        for tail in self._live if self._debugged is None and self._held_messages is None else ():
            if tail.lines is not None and tail.lines.pending and not tail.showing:
                times.append(tail.last_data + self._quiet)
        return min(times) - time.monotonic() if times else None

    def _lend(self, rank: int | None) -> None:
        """Lend or take back the terminal. No area is painted while it is lent."""
        self._debugged = rank
        for sink in dict.fromkeys((self._out, self._err)):
            self._seal_past(sink, None)
            sink.flush([], max(time.monotonic(), sink.repaint_at))
        if rank is None:
            with self.lock:
                self._queue.extend(self._deferred)
            self._deferred.clear()

    def _hide(self) -> None:
        for sink in dict.fromkeys((self._out, self._err)):
            self._seal_past(sink, None)
            sink.flush([], max(time.monotonic(), sink.repaint_at))
        self._held_messages = self._held_messages if self._held_messages is not None else deque(maxlen=_MOST_MESSAGES)

    def _unhide(self) -> None:
        if self._held_messages is None:
            return
        messages, self._held_messages = self._held_messages, None
        for tail in self._tails:
            if tail.sink.terminal:
                tail.skip()
        for text in messages:
            self._print(text)

    def _is_hidden(self, sink: Sink) -> bool:
        return self._held_messages is not None and sink.terminal

    def _skip(self, item: LogTail | bytes | _Loan) -> None:
        """Process an item while the console is hidden."""
        if isinstance(item, _Loan):
            self._debugged = item.rank
        elif isinstance(item, LogTail) and not item.sink.terminal:
            self._show(item)
        elif isinstance(item, LogTail) and item.skip() and item in self._tails:
            with self.lock:
                self._tails.remove(item)
                if item.live:
                    self._live.remove(item)
            item.close()

    def _is_held(self, tail: LogTail) -> bool:
        return self._debugged not in (None, tail.rank) or self._is_hidden(tail.sink)

    def _show(self, tail: LogTail) -> None:
        data, last = tail.take()
        if tail.lines is None:
            tail.sink.straight(data)
        elif data:
            self._process(tail, tail.lines, data)
        if last:
            self._end(tail)

    def _process(self, tail: LogTail, lines: LineModel, data: bytes) -> None:
        tail.last_data = time.monotonic()
        if tail.live and self._debugged is None:
            self._leave_prompts(tail)
        done = lines.feed(data)
        if tail.live:
            for mode in lines.modes:
                if mode[3:-1] in _MODES_SHARED:
                    tail.sink.mode(mode)
            if self._debugged is None:
                tail.sink.reclaim(self._line(tail, line) for line in lines.reclaimed)
        lines.modes.clear()
        lines.reclaimed.clear()
        if done and tail.bar_shown:
            done = done.removeprefix(tail.bar_shown)
            tail.bar_shown = b""
        self._put(tail, done)
        if tail.sink.terminal or not (lines.bar and lines.pending):
            tail.bar_due = None
        elif tail.bar_due is None:
            tail.bar_due = tail.last_data + self._bar_interval

    def _leave_prompts(self, writer: LogTail) -> None:
        """Finish prompts on the other stream of a rank that writes: it does not wait there any more."""
        for tail in self._live:
            if tail is writer or tail.sink is not writer.sink or tail.lines is None:
                continue
            if tail.showing and not tail.lines.bar:
                if tail.sink.waiting:
                    self._flush()
                if tail.sink.let_go(self._line(tail, tail.lines.states()[0])):
                    tail.lines.let_go()
                    tail.showing = False

    def _line(self, tail: LogTail, line: bytes) -> bytes:
        return self._rendered(tail, line + b"\n")[:-1]

    def _rendered(self, tail: LogTail, lines: bytes) -> bytes:
        if tail.sink.terminal and b"\x1b" in lines:
            lines = b"\n".join(map(_reset, lines.split(b"\n")))
        if not tail.prefix:
            return lines
        return tail.prefix + lines[:-1].replace(b"\n", b"\n" + tail.prefix) + b"\n"

    def _put(self, tail: LogTail, lines: bytes) -> None:
        if tail.noise is not None:
            lines = tail.noise.without(lines)
        if not lines:
            return
        self._seal_past(tail.sink, tail)
        if self._debugged is None:
            tail.sink.put(self._rendered(tail, lines))
        else:
            tail.sink.interject(lines)

    def _seal_past(self, sink: Sink, writer: LogTail | None) -> None:
        """Make finished rows final, because another writer has printed below them."""
        for tail in self._live:
            if tail is not writer and tail.sink is sink and tail.lines is not None:
                tail.lines.past.clear()

    def _print(self, text: str) -> None:
        sink = self._err
        if self._held_messages is not None and sink.terminal:
            self._held_messages.append(text)
            return
        self._seal_past(sink, None)
        lines = f"phalanx: {text.rstrip()}\n"
        if sink.terminal:
            lines = _wrapped(lines, sink.size()[1] or 80)
        if self._alone or self._debugged is not None:
            sink.interject(lines.encode(errors="replace"))
        else:
            sink.put(lines.encode(errors="replace"))

    def _end(self, tail: LogTail) -> None:
        if tail not in self._tails:
            return
        if tail.lines is not None:
            done = tail.lines.end()
            self._put(tail, done.removeprefix(tail.bar_shown) if tail.bar_shown else done)
        with self.lock:
            self._tails.remove(tail)
            if tail.live:
                self._live.remove(tail)
        if tail.lines is None or tail.live:
            tail.sink.restore()  # before messages about its end, which would be lost with the alternate screen
        if tail.skipped:
            self._print(f"{tail.skipped} bytes of output were neither logged nor shown")
        tail.close()

    def _tick(self, now: float) -> None:
        for tail in list(self._tails):
            if tail.lines is None or self._is_held(tail):
                continue
            rest = tail.lines.rest * self._quiet
            if tail.lines.rest and not tail.queued and now - tail.last_data >= rest:
                self._put(tail, tail.lines.settle())
            if tail.bar_due is not None and now >= tail.bar_due:
                tail.bar_due = now + self._bar_interval
                bar_shown = b"".join(state + b"\n" for state in tail.lines.states() if state)
                if bar_shown != tail.bar_shown:
                    tail.bar_shown = bar_shown
                    self._put(tail, bar_shown)

    def _flush(self) -> None:
        now = time.monotonic()
        for sink in dict.fromkeys((self._out, self._err)):
            if not self._is_hidden(sink):
                sink.flush(self._area(sink, now), now)

    def _area(self, sink: Sink, now: float) -> list[bytes]:
        rows: list[bytes] = []
        if self._debugged is not None:
            return rows
        if self._status and sink is self._err:
            rows.append(f"phalanx: {self._status}"[: max((sink.size()[1] or 80) - 1, 20)].encode(errors="replace"))
        for tail in self._live:
            if tail.sink is not sink or tail.lines is None:
                continue
            quiet = not tail.queued and now - tail.last_data >= self._quiet
            tail.showing = tail.lines.pending and (tail.lines.bar or tail.showing or quiet)
            if tail.showing:
                rows += [self._line(tail, state) if state else b"" for state in tail.lines.states()]
        return rows


def _same(one: int, other: int) -> bool:
    """Return whether both descriptors lead to the same place."""
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
    """End colours with the line: the next line may be of another rank."""
    return line + b"\x1b[0m" if b"\x1b[" in line and not line.endswith((b"\x1b[0m", b"\x1b[m")) else line
