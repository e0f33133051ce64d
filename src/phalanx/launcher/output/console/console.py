"""Shows the output of all ranks: whole lines of every rank, the progress bars of rank 0 below, and phalanx's messages.

A thread reads the log files as they grow. A slow terminal delays no rank, needs no memory and loses no output.

On a terminal, rank 0 is live: it has a pseudo-terminal, and its unfinished rows (a prompt, one or more bars) form an
area at the bottom that is repainted below other output. Rows are painted from a `LineModel` and never passed through,
so that nothing of another rank lands within an escape sequence. The model understands what bars use: return, newline,
cursor up and down, erase; colours are text. As long as no other process has printed, a cursor that moves up reaches
finished rows too, as on a terminal; after that they are final, and the bars start again below. While a debugger has
the terminal, output of other ranks waits in their logs, and the debugged rank has no prefix. What needs the whole
screen (cursor addressing, the alternate screen) cannot be shared by ranks and is dropped. The output of a single rank
passes unchanged, except for the traceback of a replacement that fails as the worker before it did.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from phalanx.launcher.output.console.display import Display
from phalanx.launcher.output.console.line_model import LineModel, columns
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.shown_stream import ShownStream
from phalanx.launcher.output.console.sink import Sink, attributes, restore
from phalanx.launcher.output.console.withheld import Withheld
from phalanx.launcher.output.filters import Std

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_HIDE_TIMEOUT = 5.0  # seconds for the terminal to accept pending output


@dataclass(frozen=True)
class _Loan:
    rank: int | None


@dataclass(frozen=True)
class _AwaitReport:
    tail: LogTail


@dataclass(frozen=True)
class _Drop:
    matches: Callable[[str], bool] | None
    ended: bool


@dataclass(frozen=True)
class _Release:
    ranks: Collection[int] | None


@dataclass(frozen=True)
class _Visibility:
    on: bool
    done: threading.Event


_Item = ShownStream | str | bytes | _Loan | _Visibility | _AwaitReport | _Drop | _Release


@dataclass
class _Prefixes:
    """The prefixes of the lines of ranks."""

    alone: bool  # one rank, whose lines have none
    digits: int
    given: Mapping[int, str]
    colour: bool | None  # None: only on a terminal

    def of(self, rank: int, sink: Sink) -> bytes:
        if self.alone:
            return b""
        if rank in self.given:
            return self.given[rank].encode(errors="replace")
        text = b"[%*d]" % (self.digits, rank)
        if sink.terminal if self.colour is None else self.colour:
            text = b"\x1b[%dm%b\x1b[0m" % (COLOURS[rank % len(COLOURS)], text)
        return text + b" "


class Console:
    """Shows output and messages. Create it with the world size, then call `say`, and `attach` for each stream of a
    worker; `close` at the end.

    `colour` and `terminal` override the properties of the descriptors. The thread starts with the first output, so that
    a process that has shown nothing may fork.
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
        self.hidden = False  # or about to be hidden
        self._lock = threading.RLock()
        self._prefixes = _Prefixes(world == 1 and not prefixes, len(str(world - 1)), prefixes or {}, colour)
        self._out = Sink(out, terminal=terminal)
        self._err = self._out if _same(out, err) else Sink(err, terminal=terminal)
        self._display = Display(
            self._out,
            self._err,
            self._lock,
            alone=self._prefixes.alone,
            quiet=quiet,
            bar_interval=bar_interval,
            colour=colour,
        )
        self._attributes = attributes((out, err, 0))
        self._wake = threading.Condition(self._lock)
        self._queue: deque[_Item] = deque()
        self._closing = False
        self._abandoned = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def settle(self, world: int, prefixes: Mapping[int, str]) -> None:
        """Set the final number of ranks and the prefixes of their lines. Call it before the first `attach`."""
        self._prefixes.given = prefixes
        self._prefixes.digits = len(str(world - 1))

    def waiting(self, text: str | None) -> None:
        """Show a status line at the bottom of a terminal, until the next call. None removes it."""
        with self._lock:
            if self._err.terminal and not self._closed and text != self._display.status:
                self._display.status = text
                self._enqueue("")

    def terminal(self, stream: Std) -> bool:
        """Return whether our stdout or stderr is a terminal."""
        return self._sink(stream).terminal

    @property
    def together(self) -> bool:
        """Return whether our stdout and stderr refer to the same file, and so have one order."""
        return self._out is self._err

    def window(self, rank: int, stream: Std) -> tuple[int, int]:
        """Return the rows and columns available to a rank, without its prefix."""
        sink = self._sink(stream)
        rows, width = sink.size()
        return rows, max(width - columns(self._prefixes.of(rank, sink)), 1) if width else 0

    @property
    def alone(self) -> bool:
        """Return whether there is one rank, whose output passes unchanged."""
        return self._prefixes.alone

    def attach(
        self,
        rank: int,
        stream: Std,
        log: int | None,
        size: int,
        *,
        live: bool,
        traceback: str | None = None,
        replaces: bool = False,
    ) -> LogTail:
        """Show data that is appended to the log from here on.

        `traceback`: the file with the last traceback of the worker, which is withheld until its failure was reported.
        With a single rank it is withheld only if the worker replaces another one, which may have shown the same.
        """
        sink = self._sink(stream)
        lines = None if self._prefixes.alone else LineModel(live=live)
        tail = LogTail(self._lock, lambda: self._enqueue(shown), None if log is None else os.dup(log), size)
        shown = ShownStream(sink, lines, tail, live=live)
        shown.rank, shown.prefix = rank, self._prefixes.of(rank, sink)
        if traceback is not None and (lines is not None or replaces):
            tail.withheld = Withheld(traceback)
        with self._lock:
            self._display.add(shown, first=stream == Std.ERR)  # stdout is painted last: users type at its prompt
        return tail

    def renumber(self, tail: LogTail, rank: int) -> None:
        """Label further lines with another rank."""
        with self._lock:
            for shown in self._display.streams:
                if shown.tail is tail:
                    shown.rank, shown.prefix = rank, self._prefixes.of(rank, shown.sink)

    def await_report(self, tail: LogTail) -> None:
        """Withhold the traceback in this output until `drop_withheld`: the failure of the worker is reported."""
        with self._lock:
            self._enqueue(_AwaitReport(tail))

    def drop_withheld(self, matches: Callable[[str], bool] | None = None, *, ended: bool = False) -> None:
        """Drop the withheld tracebacks that match: their failures were reported.

        `ended`: only those of streams that have ended.
        """
        with self._lock:
            self._enqueue(_Drop(matches, ended))

    def release_withheld(self, ranks: Collection[int] | None = None) -> None:
        """Show the withheld tracebacks, of these ranks or of all."""
        with self._lock:
            self._enqueue(_Release(ranks))

    def lend(self, rank: int | None) -> None:
        """Lend the terminal to the debugger of a rank. None takes it back."""
        with self._lock:
            self._enqueue(_Loan(rank))

    def hide(self) -> None:
        """Write nothing to the terminal, which another process uses. Returns when all earlier output is written.

        Meanwhile output of ranks is only in their logs, and messages are kept. A file or pipe (`2>errors`) is not
        affected.
        """
        self.hidden = True
        done = threading.Event()
        with self._lock:
            self._enqueue(_Visibility(True, done))
        done.wait(_HIDE_TIMEOUT)

    def show(self) -> None:
        """Undo `hide`: print the kept messages, and show further output."""
        self.hidden = False
        with self._lock:
            self._enqueue(_Visibility(False, threading.Event()))

    def debugger(self, data: bytes) -> None:
        """Write output of the debugger."""
        with self._lock:
            self._enqueue(data)

    def typed(self) -> None:
        """Record that the user pressed Enter, which moves the cursor to a new line."""
        with self._lock:
            self._out.entered()
            self._err.entered()

    def say(self, text: str) -> None:
        """Print a message of phalanx on stderr. Further lines of the text are details."""
        with self._lock:
            if self._closed:
                self._display.print(text)
                self._err.flush([], 0.0)
            else:
                self._enqueue(text)

    def abandon(self) -> None:
        """Stop showing output of workers. Can be called from any thread, also while `close` waits."""
        with self._lock:
            self._abandoned = True
            self._out.abandoned = self._err.abandoned = True
            self._wake.notify()

    def close(self) -> None:
        """Show everything, however long that takes, and restore the terminal.

        It blocks: in a coroutine, use `await asyncio.to_thread(console.close)`.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.2)
            if self._abandoned:
                break
        with self._lock:
            self._closed = True
            for sink in self._display.sinks:
                sink.leave()
            self._display.unhide()
            for item in self._queue:
                if isinstance(item, str) and item:  # messages are printed even if output is abandoned
                    self._display.print(item)
            self._queue.clear()
            if self._out.unwritten and not self.together:
                text = f"{self._out.unwritten} bytes of output could not be written to stdout: the disk is full"
                self._display.print(text)
            self._err.flush([], 0.0)
            if self._thread is None:
                self._display.close()
        restore(self._attributes)

    def _sink(self, stream: Std) -> Sink:
        return self._out if stream == Std.OUT else self._err

    def _enqueue(self, item: _Item) -> None:
        """Queue an item to show. The caller has the lock."""
        if isinstance(item, ShownStream):
            if item.tail.queued or self._abandoned:
                return
            item.tail.queued = True
        self._queue.append(item)
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="console", daemon=True)
            self._thread.start()
        self._wake.notify()

    # -- the thread

    def _run(self) -> None:
        display = self._display
        while True:
            with self._lock:
                while not (self._queue or self._closing or self._abandoned):
                    due = display.due()
                    if due is not None and due <= 0:
                        break
                    self._wake.wait(due)
                if self._abandoned:
                    break
                batch = list(self._queue)
                self._queue.clear()
                last = self._closing and not batch and not display.defers
            if self._closing and not batch:
                display.unhide()
                if display.defers:
                    self._lend(None)
            for item in batch:
                self._handle(item)
            if last:
                for stream in display.streams:
                    display.end(stream)
                display.withheld.release()
            display.tick(time.monotonic())
            display.flush()
            if last:
                break
        display.close()

    def _handle(self, item: _Item) -> None:
        match item:
            case str():
                if item:
                    self._display.print(item)
            case bytes():
                self._display.debugger(item)
            case _Visibility():
                self._display.hide() if item.on else self._display.unhide()
                item.done.set()
            case _AwaitReport():
                self._display.withheld.await_report(item.tail)
            case _Drop():
                self._display.withheld.drop(item.matches, besides=self._display.streams if item.ended else ())
            case _Release():
                self._display.withheld.release(item.ranks)
            case _Loan():
                self._lend(item.rank)
            case ShownStream():
                self._display.show(item)

    def _lend(self, rank: int | None) -> None:
        waiting = self._display.lend(rank)
        with self._lock:
            self._queue.extend(waiting)


def _same(one: int, other: int) -> bool:
    """Return whether both descriptors refer to the same file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(one), os.fstat(other))
    return False
