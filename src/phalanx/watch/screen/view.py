"""What is looked at, and what keys change about it. Knows nothing of terminals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import text
from phalanx.watch.screen.tail import Tail
from phalanx.watch.source import Stream

# What a key asks for that is not only a matter of looking.
Wish = Literal["", "leave", "stop", "end now", "stacks", "debugger", "suspend", "repaint"]
Question = Literal["", "stop", "stopping"]

_DIGITS = 6


@dataclass
class Pane:
    """Text over the whole body: stacks, help."""

    title: str
    text: list[str]
    top: int = 0
    lines: list[str] = field(default_factory=list)  # of the text, as it fits
    _fitting: tuple[int, int] = (0, 0)

    def fit(self, width: int) -> None:
        if self._fitting != (width, id(self.text)):
            self._fitting = (width, id(self.text))
            self.lines = [part for line in self.text for part in text.wrap(text.clean(line), width)]


@dataclass
class View:
    held: bool = False  # below `phalanx run`, whose terminal this is: then Ctrl-C is for the run
    able: bool = False  # there is something to be done: a run that lives
    rank: int = 0
    top: int = 0  # the first rank that is shown
    page: int = 8  # ranks that are shown
    follows: bool = False  # its log is all there is
    back: int = 0  # lines that the log is scrolled back
    stream: Stream = "stdout"
    overview: bool = False
    pane: Pane | None = None
    pane_page: int = 10
    question: Question = ""
    typed: str = ""
    word: str = ""  # at the bottom, until the next key
    over: bool = False  # nothing more comes
    tail: Tail = field(default_factory=Tail)

    def keep(self, scene: RunModel) -> None:
        """The chosen rank is one that is there, and to be seen."""
        ranks = sorted(scene.ranks)
        if ranks and self.rank not in scene.ranks:
            self.rank = min(ranks, key=lambda rank: abs(rank - self.rank))
        at = ranks.index(self.rank) if ranks else 0
        self.top = max(min(self.top, at, len(ranks) - self.page), at - self.page + 1, 0)

    def press(self, key: str, scene: RunModel) -> Wish:
        self.word = ""
        if key == "ctrl-z":
            return "suspend"
        if key == "ctrl-l":
            return "repaint"
        if self.question == "stop":
            return self._answer(key)
        if key == "ctrl-c":
            return self._interrupted()
        if self.pane is not None and self._scroll(key, self.pane):
            return ""
        if key.isdigit() and len(key) == 1 and key.isascii():
            self._type(key, scene)
            return ""
        typed, self.typed = self.typed, ""
        if typed and key == "backspace":
            self.typed = typed[:-1]
            return ""
        if key in ("q", "Q"):
            return "leave"
        return self._act(key, scene) or self._look(key, scene)

    def _interrupted(self) -> Wish:
        """Of our own, it is enough to look away; the run's terminal is where one stops it."""
        if not (self.held and self.able):
            return "leave"
        if self.question == "stopping":
            return "end now"
        self.question = "stop"
        return ""

    def _answer(self, key: str) -> Wish:
        if key == "ctrl-c":
            self.question = "stopping"
            return "end now" if self.held else "leave"
        self.question = "stopping" if key in ("y", "Y") else ""
        return "stop" if self.question else ""

    def _act(self, key: str, scene: RunModel) -> Wish:
        if key not in ("x", "s", "d"):
            return ""
        if not self.able and key != "s":
            self.word = "the run has ended"
            return ""
        if key == "x":
            if self.question == "stopping":
                self.word = f"it is being stopped already; phalanx stop --now {scene.run} does not let it finish"
            else:
                self.question = "stop"
            return ""
        return "stacks" if key == "s" else "debugger"

    def _type(self, digit: str, scene: RunModel) -> None:
        self.typed = (self.typed + digit)[-_DIGITS:]
        if int(self.typed) in scene.ranks:
            self.choose(int(self.typed))
        elif int(digit) in scene.ranks and not any(str(rank).startswith(self.typed) for rank in scene.ranks):
            self.typed = digit  # the beginning of another number
            self.choose(int(digit))

    def choose(self, rank: int) -> None:
        self.rank, self.back = rank, 0

    def _look(self, key: str, scene: RunModel) -> Wish:
        match key:
            case "f" | "enter":
                self.follows, self.back = not self.follows, 0
            case "escape":
                self.follows, self.overview, self.back = False, False, 0
            case "e":
                self.stream, self.back = "stderr" if self.stream == "stdout" else "stdout", 0
            case "g" | "tab":
                self.overview = not self.overview
            case "?" | "h":
                self.pane = Pane("keys", HELP)
            case "up" | "down" | "page up" | "page down" | "home" | "end" if self.follows:
                self.back += {"up": 1, "down": -1, "page up": 20, "page down": -20}.get(key, 0)
                most = len(self.tail.lines) - 1
                self.back = most if key == "home" else 0 if key == "end" else max(0, min(self.back, most))
            case _:
                self._move(key, scene)
        return ""

    def _move(self, key: str, scene: RunModel) -> None:
        ranks = sorted(scene.ranks)
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
            at = ranks.index(self.rank) if self.rank in scene.ranks else 0
            self.choose(ranks[max(0, min(at + by, len(ranks) - 1))])

    def _scroll(self, key: str, pane: Pane) -> bool:
        """Whether the pane has taken it."""
        if key in ("escape", "q", "enter", "?", "backspace"):
            self.pane = None
            return True
        page = max(self.pane_page - 1, 1)
        by = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, " ": page}.get(key)
        last = max(len(pane.lines) - self.pane_page, 0)
        if key in ("home", "end"):
            pane.top = 0 if key == "home" else last
        elif by is not None:
            pane.top = max(0, min(pane.top + by, last))
        return by is not None or key in ("home", "end")


HELP = [
    "up down j k      the rank above, the rank below",
    "PgUp PgDn        a page of ranks; Home End: the first, the last",
    "0-9              a rank by its number",
    "g Tab            every rank as a sign, and back",
    "",
    "f Enter          only the log of the chosen rank; up and down scroll it",
    "e                its stdout, its stderr",
    "",
    "s                the stacks of all ranks, and what is wrong if something is",
    "d                a debugger in the chosen rank; it stops there until you leave it",
    "x                stop the run (asks first)",
    "",
    "Ctrl-Z           to the shell; fg comes back.  Ctrl-L: paint again",
    "q                leave; the run goes on",
    "",
    "data compute wait: what a rank has spent its time on, since the last look",
    "letters (f): d data, f forward, b backward, w waits for others, o optimizer, n none of these;",
    "a capital: a step has ended",
]
