"""Lines that phalanx itself prints about a run, and their copies in the run folder."""

from __future__ import annotations

import time

from phalanx.contract import events
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.filters import Std
from phalanx.launcher.runs.run_folder import RunFolder

_WAITING_DELAY = 3.0  # seconds before the first line about what the run is waiting for
_WAITING_INTERVAL = 30.0  # seconds between two such lines, if there is no terminal


class Notices:
    """Prints lines on the console, unless --quiet, and writes them to the run folder."""

    def __init__(self, folder: RunFolder, console: Console, *, quiet: bool) -> None:
        self._folder = folder
        self._console = console
        self._quiet = quiet
        self._last_waiting_note = 0.0

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line and write it to the run folder.

        `repeats`: an event with the same content is already there, and only the console needs the line.
        """
        self.record(text, repeats=repeats)
        self.say(text)

    def record(self, text: str, *, repeats: bool = False) -> None:
        """Write a line to the run folder without printing it."""
        self._folder.event(events.NoteEvent(time=time.time(), text=text, repeats=repeats))

    def say(self, text: str) -> None:
        """Print a line that is not an event: it is already in the run folder."""
        if not self._quiet:
            self._console.say(text)

    def waiting(self, text: str | None) -> None:
        """Show what the run is waiting for: on a terminal one line that changes, elsewhere a line at intervals."""
        self._console.waiting(text)
        if text is None or self._console.terminal(Std.ERR):
            return
        now = time.monotonic()
        self._last_waiting_note = self._last_waiting_note or now - _WAITING_INTERVAL + _WAITING_DELAY
        if now - self._last_waiting_note > _WAITING_INTERVAL:
            self._last_waiting_note = now
            self.note(text, repeats=True)
