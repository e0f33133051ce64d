"""The owner of the terminal: the console, the debugger of a rank, or the screen of the run, which hides the console."""

from __future__ import annotations

from collections import deque

from phalanx.launcher.output.console.shown_stream import ShownStream
from phalanx.launcher.output.console.sink import Sink

_MOST_MESSAGES = 500  # of phalanx, kept while the console is hidden


class TerminalHolder:
    """The owner of the terminal, and the output that waits until the console has it again."""

    def __init__(self) -> None:
        self.debugged: int | None = None  # the rank whose debugger has the terminal
        self.deferred: list[ShownStream] = []  # to be shown when it ends
        self.messages: deque[str] | None = None  # while hidden: messages to print afterwards

    @property
    def hidden(self) -> bool:
        """Return whether nothing is written to a terminal."""
        return self.messages is not None

    def hide(self) -> None:
        """Keep messages from now on; if there are many, the newest."""
        if self.messages is None:
            self.messages = deque(maxlen=_MOST_MESSAGES)

    def hides(self, sink: Sink) -> bool:
        """Return whether nothing is written to this sink."""
        return self.hidden and sink.terminal

    def holds(self, stream: ShownStream) -> bool:
        """Return whether the output of a stream must wait, or is not shown at all."""
        return self.debugged not in (None, stream.rank) or self.hides(stream.sink)
