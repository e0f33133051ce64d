"""What is drawn, for any size, and the effects of keys, without a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.contract import events
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.status import RunStatus
from phalanx.watch.screen import frame, picture
from phalanx.watch.screen.signs import ASCII, UNICODE, Signs, signs
from phalanx.watch.screen.tail import Tail
from phalanx.watch.screen.terminal import text
from phalanx.watch.screen.terminal.canvas import Canvas
from phalanx.watch.screen.terminal.keys import Keys
from phalanx.watch.screen.terminal.paint import Painter
from phalanx.watch.screen.view import View
from phalanx.watch.source import LogPart, Source, Stream
from tests.kit.proc import SLOWEST

NOW = 1.7e9


def model_of(ranks: int, seconds: int) -> RunModel:
    model = RunModel()
    for event in simulation.begin(ranks, now=NOW):
        model.apply(event)
    for number in range(seconds):
        for event in simulation.second(number, ranks, now=NOW + 2 + number):
            model.apply(event)
    return model


def drawn(model: RunModel, view: View, columns: int = 80, rows: int = 24, signs: Signs = UNICODE) -> list[str]:
    lines = frame.draw(model, view, Canvas(columns, rows, signs), model.now)
    assert len(lines) == rows
    assert all(text.length(line) <= columns for line in lines)
    return ["".join(piece for piece, _ in line) for line in lines]


@pytest.mark.parametrize("ranks", [0, 1, 8, 512])
def test_every_size(ranks: int) -> None:
    model = model_of(ranks, 45) if ranks else RunModel(RunStatus("a run"))
    for keys in ("", "f", "g", "?", "x"):
        view = View(able=True)
        view.tail.switch(0, "stdout")
        view.tail.take(LogPart(start=0, end=9, text="日本語 wide\n" * 50))
        for key in keys:
            view.press(key, model)
        for columns, rows in ((1, 1), (5, 2), (20, 5), (40, 10), (80, 24), (100, 30), (120, 40), (300, 80), (80, 60)):
            drawn(model, view, columns, rows)
            drawn(model, view, columns, rows, ASCII)


def test_what_matters_is_seen_on_a_small_screen() -> None:
    shown = drawn(model_of(8, 45), View())
    assert "stalled" in shown[0]
    assert "goodput" in shown[0]
    assert "/1000" in shown[1]
    assert "■" in shown[5]  # rank 2, not only by its colour
    assert "stuck" in shown[5]
    assert any("verdict" in line and "rank 2 is in data loading" in line for line in shown)


def test_a_node_that_is_missing() -> None:
    model = RunModel()
    for event in simulation.begin(16, now=NOW)[:2]:
        model.apply(event)
    shown = "\n".join(drawn(model, View()))
    assert "waiting for nodes: 1 of 2 joined" in shown
    assert "missing: node1" in shown


def test_why_it_has_failed_stays() -> None:
    model = model_of(2, 5)
    model.apply(events.WorkerFailed(time=NOW + 9, rank=1, summary="ValueError: no good", code=1))
    model.apply(events.RunEnded(time=NOW + 9, code=1, seconds=9))
    view = View(over=True)
    shown = drawn(model, view)
    assert "failed (exit code 1)" in shown[0]
    assert any("ValueError: no good" in line for line in shown)
    assert "the run has ended, exit code 1; q leaves" in shown[-1]


def test_a_frame_costs_little() -> None:
    for ranks in (8, 512):
        model, view, painter = model_of(ranks, 30), View(), Painter(colour=True, ascii_only=False)
        took = []
        for _ in range(20):
            start = time.thread_time()
            painter.forget()
            painter.frame(frame.draw(model, view, Canvas(80, 24, UNICODE), NOW), 80, 24)
            took.append(time.thread_time() - start)
        assert min(took) < 0.01 * SLOWEST


def test_only_changed_cells_are_written() -> None:
    model, view, painter = model_of(8, 30), View(), Painter(colour=True, ascii_only=False)

    def frame_of() -> bytes:
        return painter.frame(frame.draw(model, view, Canvas(80, 24, UNICODE), model.now), 80, 24)

    assert len(frame_of()) > 1000
    assert frame_of() == b""
    view.press("j", model)
    changed = frame_of()
    assert changed.count(b"H") < 8
    assert b"\x1b[2J" not in changed


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[6~", ["up", "down", "page up", "page down"]),
        (b"\x1b[H\x1b[4~\x1b[1;5A", ["home", "end"]),
        (b"\x03\x1a\r\t\x7f", ["ctrl-c", "ctrl-z", "enter", "tab", "backspace"]),
        (b"a\x1b[200~xy\x1b[Aq\x1b[201~b", ["a", "b"]),
        (b"\x1bx", []),  # Alt
        ("é".encode(), ["é"]),
    ],
)
def test_keys(typed: bytes, expected: list[str]) -> None:
    assert Keys().feed(typed) == expected
    one_by_one = Keys()
    if typed.isascii():
        assert [key for byte in typed for key in one_by_one.feed(bytes([byte]))] == expected


def test_an_escape_alone() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b") == []
    assert keys.halfway
    assert keys.lapse() == ["escape"]
    assert not keys.halfway


def test_the_end_of_what_is_pasted_comes_late() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b[200~x\x1b[20") == []
    assert keys.lapse() == []
    assert keys.feed(b"1~q") == ["q"]
    assert keys.feed(b"\x1b[200~x\x1b[20") == []
    assert keys.feed(b"\x03") == ["ctrl-c"]  # it never comes
    assert keys.feed(b"q") == ["q"]


@given(st.binary(max_size=200))
def test_whatever_is_typed(data: bytes) -> None:
    keys, model, view = Keys(), model_of(3, 2), View(able=True, owned_by_run=True)
    for key in [*keys.feed(data), *keys.lapse()]:
        view.press(key, model)
    assert view.rank in model.ranks


@given(st.text(max_size=60), st.integers(0, 40))
def test_whatever_is_written(words: str, cells: int) -> None:
    shown = text.clean(words)
    assert shown.isprintable()
    assert text.width(text.cut(shown, cells)) <= cells
    assert text.width(text.fit(shown, cells)) == cells
    assert all(text.width(part) <= cells for part in text.wrap(shown, cells))


def test_wrapped_text_is_all_there() -> None:
    words = "  File train.py, line 41, in step: loss.backward() " + "x" * 50
    parts = text.wrap(words, 30)
    assert len(parts) > 2
    assert "".join(part.strip() for part in parts).replace(" ", "") == words.replace(" ", "")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("a\x1b[2J\x1b[10;1Hb", "ab"),
        ("a\x1b]0;title\x07b\x1b]52;c;AAAA\x1b\\c", "abc"),
        ("a\x1bcb\x1b", "ab"),
        ("a\x9b2Jb", "a 2Jb"),
        ("a\u202eb\u2028c\x00d", "a b c d"),
        ("a\x07\x08b", "ab"),
        ("a\tb", "a       b"),
        ("über 日本語", "über 日本語"),
    ],
)
def test_control_characters_are_removed(written: str, expected: str) -> None:
    assert text.clean(written) == expected


def test_control_characters_are_not_painted() -> None:
    """The folder of another user's run may contain anything."""
    model, view = model_of(2, 3), View(follows=True)
    model.ranks[0].activity.strip.letters = "ddd\x1b]0;title\x07\x1b[2Jfff"
    painted = Painter(colour=False, ascii_only=False).frame(
        frame.draw(model, view, Canvas(80, 24, UNICODE), NOW), 80, 24
    )
    assert b"]0;" not in painted
    assert painted.count(b"\x1b[2J") == 1  # our own


def feed(tail: Tail, *parts: str) -> Sequence[str]:
    at = 0
    for part in parts:
        tail.take(LogPart(start=at, end=at + len(part), text=part))
        at += len(part)
    return tail.shown


def test_the_tail_of_a_log() -> None:
    tail = Tail()
    tail.switch(0, "stdout")
    assert feed(tail, "one\ntw", "o\r\n 10%|\r 20%|\r", " 30%|") == ["one", "two", " 30%|"]
    assert tail.take(LogPart(start=0, end=3, text="new"))  # the file is another one
    assert tail.shown == []
    tail.take(LogPart(start=0, end=3, text="new"))
    assert tail.shown == ["new"]
    other = Tail()
    other.switch(1, "stderr")
    other.take(LogPart(start=100, end=120, text="half a line\nwhole\n"))
    assert other.shown == ["whole"]


class Growing:
    """A log that grows faster than it is read."""

    def __init__(self) -> None:
        self.text = "line 0\n"

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:
        first = max(0, len(self.text) - size) if start is None else start
        part = self.text[first : first + size]
        return LogPart(start=first, end=first + len(part), text=part)


def test_the_tail_of_a_log_that_grows_fast() -> None:
    async def read() -> list[list[str]]:
        log, tail, seen = Growing(), Tail(), []
        tail.switch(0, "stdout")
        for number in range(1, 6):
            await tail.read(cast("Source", log), whole=number == 4)
            seen.append(tail.shown)
            log.text += f"line {number} {'x' * 90}\n" * 1000 + f"end {number}\n"
        return seen

    first, *seen = asyncio.run(read())
    assert first == ["line 0"]
    assert [lines[-1] for lines in seen[:2]] == ["end 1", "end 2"]
    assert seen[2][-1].startswith("line 3")  # the position of a user who has scrolled is kept
    assert seen[2][: len(seen[1])] == seen[1]
    assert seen[3][-1] == "end 4"


def test_signs_by_locale() -> None:
    assert signs({"LANG": "de_DE.UTF-8"}) is UNICODE
    assert signs({"LANG": "de_DE.UTF-8", "LC_ALL": "C"}) is ASCII
    assert signs({}) is ASCII


def test_a_picture_for_docs() -> None:
    drawn = picture.svg(model_of(8, 45))
    assert drawn.startswith("<svg")
    assert "train-simulated" in drawn
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
