"""What the screen shows, and how keys change it. Independent of terminals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen.tail import Tail
from phalanx.watch.screen.terminal import text
from phalanx.watch.source import Stream

# The action that a key requests from the screen.
Action = Literal["", "leave", "stop", "interrupt", "end now", "stacks", "debugger", "suspend", "repaint"]
Question = Literal["", "stop", "stopping"]

_DIGITS = 6


@dataclass
class Pane:
    """Text over the whole body: stacks, help."""

    title: str
    text: list[str]
    top: int = 0  # index of the first visible line
    page: int = 10  # number of visible lines
    lines: list[str] = field(default_factory=list)  # of the text, as it fits
    _fitting: tuple[int, int] = (0, 0)

    def fit(self, width: int) -> None:
        """Wrap the text to a width."""
        if self._fitting != (width, id(self.text)):
            self._fitting = (width, id(self.text))
            self.lines = [part for line in self.text for part in text.wrap(text.clean(line), width)]

    def scroll(self, key: str) -> bool:
        """Return whether the key scrolls."""
        page = max(self.page - 1, 1)
        by = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, " ": page}.get(key)
        last = max(len(self.lines) - self.page, 0)
        if key in ("home", "end"):
            self.top = 0 if key == "home" else last
        elif by is not None:
            self.top = max(0, min(self.top + by, last))
        return by is not None or key in ("home", "end")


@dataclass
class View:
    """The selection, the scroll positions and open questions."""

    owned_by_run: bool = False  # in the terminal of `phalanx run`: Ctrl-C stops the run
    able: bool = False  # the run is live: it can be stopped and debugged
    rank: int = 0
    top: int = 0  # index of the first visible rank
    page: int = 8  # number of visible ranks
    follows: bool = False  # show only the log
    stream: Stream = "stdout"
    overview: bool = False
    pane: Pane | None = None
    question: Question = ""
    interrupted: bool = False  # Ctrl-C has asked the question
    typed: str = ""
    word: str = ""  # message in the last line, until the next key
    over: bool = False  # no more events
    tail: Tail = field(default_factory=Tail)

    def keep(self, model: RunModel) -> None:
        """Make sure that the chosen rank exists and is visible."""
        ranks = sorted(model.ranks)
        if ranks and self.rank not in model.ranks:
            self.rank = min(ranks, key=lambda rank: abs(rank - self.rank))
        at = ranks.index(self.rank) if ranks else 0
        self.top = max(min(self.top, at, len(ranks) - self.page), at - self.page + 1, 0)

    def press(self, key: str, model: RunModel) -> Action:
        """Handle a key. Return the action for the screen."""
        self.word = ""
        if key == "ctrl-z":
            return "suspend"
        if key == "ctrl-l":
            return "repaint"
        if self.question == "stop":
            return self._answer(key)
        if key == "ctrl-c":
            return self._interrupted()
        if self.pane is not None:
            if key in ("escape", "q", "enter", "?", "backspace"):
                self.pane = None
                return ""
            if self.pane.scroll(key):
                return ""
        if key.isdigit() and len(key) == 1 and key.isascii():
            self._type(key, model)
            return ""
        typed, self.typed = self.typed, ""
        if typed and key == "backspace":
            self.typed = typed[:-1]
            return ""
        if key in ("q", "Q"):
            return "leave"
        return self._act(key, model) or self._look(key, model)

    def _interrupted(self) -> Action:
        """Handle Ctrl-C: leave `phalanx watch`, or stop the run if this is its terminal."""
        if not (self.owned_by_run and self.able):
            return "leave"
        if self.question == "stopping":
            return "end now"
        self.question, self.interrupted = "stop", True
        return ""

    def _answer(self, key: str) -> Action:
        if key == "ctrl-c":
            self.question = "stopping"
            return "end now" if self.owned_by_run else "leave"
        self.question = "stopping" if key in ("y", "Y") else ""
        interrupted, self.interrupted = self.interrupted, False
        if not self.question:
            return ""
        return "interrupt" if interrupted else "stop"

    def _act(self, key: str, model: RunModel) -> Action:
        if key not in ("x", "s", "d"):
            return ""
        if not self.able and key != "s":
            self.word = "the run has ended"
            return ""
        if key == "x":
            if self.question == "stopping":
                self.word = f"already stopping; phalanx stop --now {model.run.name} does not wait"
            else:
                self.question = "stop"
            return ""
        return "stacks" if key == "s" else "debugger"

    def _type(self, digit: str, model: RunModel) -> None:
        self.typed = (self.typed + digit)[-_DIGITS:]
        if int(self.typed) in model.ranks:
            self.choose(int(self.typed))
        elif int(digit) in model.ranks and not any(str(rank).startswith(self.typed) for rank in model.ranks):
            self.typed = digit  # the first digit of another number
            self.choose(int(digit))

    def choose(self, rank: int) -> None:
        """Select a rank."""
        self.rank, self.tail.back = rank, 0

    def _look(self, key: str, model: RunModel) -> Action:
        match key:
            case "f" | "enter":
                self.follows, self.tail.back = not self.follows, 0
            case "escape":
                self.follows, self.overview, self.tail.back = False, False, 0
            case "e":
                self.stream, self.tail.back = "stderr" if self.stream == "stdout" else "stdout", 0
            case "g" | "tab":
                self.overview = not self.overview
            case "?" | "h":
                self.pane = Pane("keys", HELP)
            case "up" | "down" | "page up" | "page down" | "home" | "end" if self.follows:
                self.tail.scroll(key)
            case _:
                self._move(key, model)
        return ""

    def _move(self, key: str, model: RunModel) -> None:
        ranks = sorted(model.ranks)
        by = {
            "up": -1,
            "k": -1,
            "left": -1,
            "down": 1,
            "j": 1,
            "right": 1,
            "page up": -self.page,
            "page down": self.page,
            "home": -len(ranks),
            "end": len(ranks),
        }.get(key)
        if by and ranks:
            at = ranks.index(self.rank) if self.rank in model.ranks else 0
            self.choose(ranks[max(0, min(at + by, len(ranks) - 1))])


HELP = [
    "up down j k      previous rank, next rank",
    "PgUp PgDn        a page of ranks; Home End: first, last",
    "0-9              select a rank by its number",
    "g Tab            overview: one symbol per rank",
    "",
    "f Enter          only the log of the selected rank; up and down scroll it",
    "e                switch between stdout and stderr",
    "",
    "s                stacks of all ranks, and the verdict if the run is stalled",
    "d                debug the selected rank; it is paused until you leave the debugger",
    "x                stop the run (asks first)",
    "",
    "Ctrl-Z           suspend; fg returns.  Ctrl-L: redraw",
    "q                leave; the run continues",
    "",
    "data compute wait: shares of the time of a rank, since the last sample",
    "letters (f): d data, f forward, b backward, w waits for others, o optimizer, n none of these;",
    "a capital letter: a step ended",
]
