"""The content of stdout and stderr: finished lines of all ranks, unfinished rows of live streams, messages of
phalanx.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from threading import RLock

from phalanx.contract.visible import visible, visible_line
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.shown_stream import ShownStream
from phalanx.launcher.output.console.sink import Sink
from phalanx.launcher.output.console.terminal_holder import TerminalHolder
from phalanx.launcher.output.console.withheld import Withheld

BATCH = 1 << 22  # bytes collected before they are written


class WithheldTracebacks:
    """The withheld tracebacks, also of streams that have ended. `show` shows lines of a stream."""

    def __init__(self, show: Callable[[ShownStream, bytes], None]) -> None:
        self._show = show
        self._streams: list[tuple[ShownStream, Withheld]] = []

    def add(self, stream: ShownStream) -> None:
        """Add a stream, if its traceback must be withheld."""
        if stream.tail.withheld is not None:
            self._streams.append((stream, stream.tail.withheld))

    @property
    def due(self) -> float | None:
        """Return when `show_overdue` has something to show."""
        return min((withheld.due for _, withheld in self._streams if withheld.due is not None), default=None)

    def show_overdue(self, now: float) -> None:
        """Show output that has waited too long."""
        for stream, withheld in self._streams:
            self._show(stream, withheld.overdue(now))

    def await_report(self, tail: LogTail) -> None:
        """Withhold the output of this stream until `drop` or `release`."""
        for stream, withheld in self._streams:
            if stream.tail is tail:
                withheld.await_report()

    def drop(self, matches: Callable[[str], bool] | None = None, *, besides: Collection[ShownStream] = ()) -> None:
        """Drop the withheld output that matches, except of the streams `besides`: it was reported."""
        for stream, withheld in self._streams:
            if stream not in besides:
                withheld.drop(matches)

    def release(self, ranks: Collection[int] | None = None) -> None:
        """Show the withheld output, of these ranks or of all."""
        for stream, withheld in self._streams:
            if ranks is None or stream.rank in ranks:
                self._show(stream, withheld.release())


class Display:
    """Shows streams and messages. Only the thread of the console uses it, except where a method says otherwise.

    `alone`: there is one rank, and its output passes unchanged.
    """

    def __init__(
        self, out: Sink, err: Sink, lock: RLock, *, alone: bool, quiet: float, bar_interval: float, colour: bool | None
    ) -> None:
        self.out = out
        self.err = err
        self.status: str | None = None  # at the bottom of a terminal
        self._lock = lock  # of the lists of streams, to which other threads add
        self._alone = alone
        self._colour = colour  # None: on a terminal
        self._quiet = quiet  # seconds after which an unfinished line is shown
        self._bar_interval = bar_interval  # seconds between two states of a bar without a terminal
        self._streams: dict[ShownStream, None] = {}  # in the order in which they were added
        self._unfinished: dict[ShownStream, None] = {}  # streams that must be checked again after a while
        self._live: list[ShownStream] = []
        self._terminal = TerminalHolder()
        self.withheld = WithheldTracebacks(self._show_lines)

    @property
    def streams(self) -> tuple[ShownStream, ...]:
        """Return the streams that have not ended. Any thread may call it, with the lock."""
        return tuple(self._streams)

    @property
    def sinks(self) -> Iterator[Sink]:
        """Return stdout and stderr: one sink, if both refer to the same file."""
        return iter(dict.fromkeys((self.out, self.err)))

    @property
    def defers(self) -> bool:
        """Return whether output waits for the end of a debugger."""
        return bool(self._terminal.deferred)

    def add(self, stream: ShownStream, *, first: bool) -> None:
        """Add a stream, from any thread, with the lock. `first`: paint its rows above those of others."""
        self._streams[stream] = None
        self.withheld.add(stream)
        if stream.live:
            self._live.insert(0 if first else len(self._live), stream)

    def due(self) -> float | None:
        """Return the seconds until `tick` and `flush` have something to do, or None."""
        times = [sink.repaint_at for sink in (self.out, self.err) if sink.late and not self._terminal.hides(sink)]
        dues = [stream.due(self._quiet) for stream in self._unfinished if not self._terminal.holds(stream)]
        if self._terminal.debugged is None and not self._terminal.hidden:
            dues += [stream.painting_due(self._quiet) for stream in self._live]
        dues.append(self.withheld.due)
        times += [due for due in dues if due is not None]
        return min(times) - time.monotonic() if times else None

    # -- who has the terminal

    def lend(self, rank: int | None) -> list[ShownStream]:
        """Lend the terminal to the debugger of a rank, or take it back. Return the streams to show now.

        No area is painted while it is lent.
        """
        self._terminal.debugged = rank
        if self._terminal.hidden:
            return []
        self._leave_area()
        if rank is not None:
            return []
        deferred, self._terminal.deferred = self._terminal.deferred, []
        return deferred

    def hide(self) -> None:
        """Write nothing to a terminal until `unhide`."""
        self._leave_area()
        self._terminal.hide()

    def unhide(self) -> None:
        """Print the kept messages. Output of ranks during that time is only in their logs."""
        messages, self._terminal.messages = self._terminal.messages, None
        if messages is None:
            return
        for stream in self.streams:
            if stream.sink.terminal:
                stream.tail.skip()
        for text in messages:
            self.print(text)

    def _leave_area(self) -> None:
        for sink in self.sinks:
            self._seal_past(sink, None)
            sink.flush([], max(time.monotonic(), sink.repaint_at))

    # -- output

    def show(self, stream: ShownStream) -> None:
        """Show the pending output of a stream. Not while another process has the terminal."""
        if self._terminal.hides(stream.sink):
            if stream.tail.skip() and stream in self._streams:
                self._remove(stream)
                stream.tail.close()
            return
        if not self._terminal.hidden and self._terminal.holds(stream):
            self._terminal.deferred.append(stream)
            return
        data, last = stream.tail.take(read=not stream.sink.dead)
        if stream.lines is None:
            stream.sink.straight(stream.unwithheld(data, time.monotonic()))
        elif data:
            self._process(stream, data)
        if last:
            self.end(stream)
        if stream.sink.waiting > BATCH and not self._terminal.hidden:
            self.flush()

    def debugger(self, data: bytes) -> None:
        """Write output of the debugger."""
        if not self._terminal.hidden:
            self.out.straight(data)

    def print(self, text: str) -> None:
        """Print a message of phalanx on stderr. A `FailureText` is printed in colour."""
        sink = self.err
        if self._terminal.messages is not None and sink.terminal:
            self._terminal.messages.append(text)
            return
        self._seal_past(sink, None)
        lines = f"phalanx: {visible(text.rstrip())}\n"
        if sink.terminal:
            lines = _wrapped(lines, sink.size()[1] or 80)
        if isinstance(text, FailureText) and (sink.terminal if self._colour is None else self._colour):
            lines = painted(lines)
        if self._alone or self._terminal.debugged is not None:
            sink.interject(lines.encode(errors="replace"))
        else:
            sink.put(lines.encode(errors="replace"))

    def end(self, stream: ShownStream) -> None:
        """Show the rest of a stream."""
        if stream not in self._streams:
            return
        if stream.lines is not None:
            self._put(stream, stream.end())
        else:
            stream.sink.straight(stream.unwithheld(b"", time.monotonic(), last=True))
        self._remove(stream)
        if stream.lines is None or stream.live:
            stream.sink.restore()  # before messages about its end, which would be lost with the alternate screen
        if stream.tail.skipped:
            self.print(f"{stream.tail.skipped} bytes of output were neither logged nor shown")
        stream.tail.close()

    def tick(self, now: float) -> None:
        """Show unfinished lines that are due."""
        for stream in list(self._unfinished):
            if not self._terminal.holds(stream):
                for lines in stream.overdue(now, self._quiet, self._bar_interval):
                    self._put(stream, lines)
                if stream.due(self._quiet) is None:
                    del self._unfinished[stream]
        self.withheld.show_overdue(now)

    def flush(self) -> None:
        """Write everything, and paint the area."""
        now = time.monotonic()
        for sink in self.sinks:
            if not self._terminal.hides(sink):
                sink.flush(self._area(sink, now), now)

    def close(self) -> None:
        """Close the logs."""
        for stream in self.streams:
            stream.tail.close()

    def _process(self, stream: ShownStream, data: bytes) -> None:
        if stream.live and self._terminal.debugged is None:
            self._leave_prompts(stream)
        done = stream.feed(data, time.monotonic(), self._bar_interval)
        stream.take_over(reclaim=self._terminal.debugged is None)
        self._put(stream, done)
        if stream.due(self._quiet) is not None:
            self._unfinished[stream] = None

    def _leave_prompts(self, writer: ShownStream) -> None:
        """Finish prompts on the other stream of a rank that writes."""
        for stream in self._live:
            if stream is not writer and stream.sink is writer.sink and stream.prompts:
                if stream.sink.waiting:
                    self.flush()
                stream.leave_prompt()

    def _put(self, stream: ShownStream, lines: bytes) -> None:
        if stream.tail.noise is not None:
            lines = stream.tail.noise.without(lines)
        if stream.tail.withheld is not None and self._terminal.debugged is None:
            lines = stream.tail.withheld.feed(lines, time.monotonic())
        self._show_lines(stream, lines)

    def _show_lines(self, stream: ShownStream, lines: bytes) -> None:
        if not lines:
            return
        if stream.lines is None:
            stream.sink.straight(lines)
            return
        self._seal_past(stream.sink, stream)
        if self._terminal.debugged is None:
            stream.sink.put(stream.rendered(lines))
        else:
            stream.sink.interject(lines)

    def _seal_past(self, sink: Sink, writer: ShownStream | None) -> None:
        for stream in self._live:
            if stream is not writer and stream.sink is sink:
                stream.seal()

    def _remove(self, stream: ShownStream) -> None:
        with self._lock:
            del self._streams[stream]
            self._unfinished.pop(stream, None)
            if stream.live:
                self._live.remove(stream)

    def _area(self, sink: Sink, now: float) -> list[bytes]:
        rows: list[bytes] = []
        if self._terminal.debugged is not None:
            return rows
        if self.status and sink is self.err:
            row = f"phalanx: {visible_line(self.status)}"[: max((sink.size()[1] or 80) - 1, 20)]
            rows.append(row.encode(errors="replace"))
        for stream in self._live:
            if stream.sink is sink:
                rows += stream.area(now, self._quiet)
        return rows


class FailureText(str):
    """A message about a failure."""

    __slots__ = ()


_PLACE = re.compile(r"^( +)(\S.*?:\d+)( in \S+)?$")
_MINOR = re.compile(r"^  (?:…|afterwards: |all of its output:|ended with |on |not retrying: )")


def painted(lines: str) -> str:
    """Return the message about a failure in colour: the first line, and the places in files."""
    first, *more = lines.rstrip("\n").split("\n")
    found = [f"\x1b[1;31m{first}\x1b[0m"]
    for line in more:
        if place := _PLACE.match(line):
            found.append(f"{place[1]}\x1b[36m{place[2]}\x1b[0m{place[3] or ''}")
        else:
            found.append(f"\x1b[2m{line}\x1b[0m" if _MINOR.match(line) else line)
    return "\n".join(found) + "\n"


def _wrapped(lines: str, width: int) -> str:
    import textwrap  # only for messages on a terminal

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
