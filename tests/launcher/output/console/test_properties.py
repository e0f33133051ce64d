"""Any stream in any chunks gives the lines that a terminal would show."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.launcher.output.console import sink as sink_module
from phalanx.launcher.output.console.line_model import LineModel, columns, overwrite, plain
from tests.launcher.output.console.emulator import Captured, Screen, Worker

TOKENS = ["a", "bcd", "é", " ", "\n", "\r", "\r\n", "\x1b[A", "\x1b[2A", "\x1b[K", "\x1b[2K", "\x1b[J"]
TOKENS += ["\x1b[31m", "\x1b[0m", "\x1b[?25l", "\x1b", "\x1b[", "\x1b[12345"]
STREAMS = st.lists(st.sampled_from(TOKENS), max_size=30).map(lambda tokens: "".join(tokens).encode())


@st.composite
def chunked(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> list[bytes]:
    text = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=500, deadline=None)
@given(chunked(STREAMS), st.sampled_from([3, 7, 1 << 20]))
@example([b"x\x1b", b"[A\ry\n"], 1 << 20)
@example([b"abc\r", b"\n"], 1 << 20)
@example([b"abc\r", b"\n\x1b[Ax"], 1 << 20)
@example([b"\ra\x1b[K", b"\x1b[31m"], 1 << 20)
@example([b"aa\x1b[2A12345\r", b"\na\x1b[Aa"], 3)
def test_any_chunks_of_a_stream_give_the_same_lines(chunks: list[bytes], limit: int) -> None:
    whole, pieces = LineModel(limit=limit), LineModel(limit=limit)
    expected = whole.feed(b"".join(chunks)) + whole.end()
    assert b"".join(pieces.feed(chunk) for chunk in chunks) + pieces.end() == expected


@settings(max_examples=300, deadline=None)
@given(chunked(st.text("ab\n\r ", max_size=60).map(str.encode)))
def test_lines_are_what_a_terminal_would_show(chunks: list[bytes]) -> None:
    lines = LineModel()
    shown = b"".join(lines.feed(chunk) for chunk in chunks) + lines.end()
    rows = [row.rstrip() for row in shown.decode().split("\n")]
    while rows and not rows[-1]:
        rows.pop()
    assert rows == Screen().feed(b"".join(chunks)).rows


BARS = ["a", "bcd ", "é", "\n", "\n", "\r", "\x1b[A\r", "\r\x1b[2A", "\r\x1b[K", "\r\x1b[J"]
BARS += ["\r\x1b[2K\x1b[1A\x1b[2K", "\x1b[32mgreen\x1b[0m"]
MOVING = st.lists(st.sampled_from(BARS), max_size=25).map(lambda tokens: "".join(tokens).encode())


@settings(max_examples=150, deadline=None)
@given(chunked(MOVING))
def test_a_live_rank_that_nobody_disturbs_sees_its_own_terminal(chunks: list[bytes]) -> None:
    above = b"".join(b"line %d\n" % n for n in range(20))  # a cursor cannot leave a terminal at the top
    with Captured(2, terminal=True, prefixes={0: ""}, quiet=0.0) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_module, "REPAINT", 0.0)
        live = Worker(shown.console, 0, live=True)
        for chunk in [above, *chunks]:
            live.write(chunk)
            shown.caught_up()
        assert Screen().feed(shown.out).rows == Screen().feed(above + b"".join(chunks)).rows
        live.end()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(BARS), st.none()), max_size=25))
def test_lines_of_others_are_whole_whatever_the_live_rank_does(tokens: list[str | None]) -> None:
    with Captured(2, terminal=True, colour=False) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_module, "REPAINT", 0.0)
        live, other = Worker(shown.console, 0, live=True), Worker(shown.console, 1)
        count = 0
        for token in tokens:
            if token is None:
                other.write(f"line {count}\n")
                count += 1
            else:
                live.write(token)
            shown.caught_up()
        live.end()
        other.end()
        shown.console.close()
        rows = Screen().feed(shown.out).rows
        assert [row for row in rows if row.startswith("[1]")] == [f"[1] line {n}" for n in range(count)]
        assert all(row.startswith(("[0]", "[1]")) or not row for row in rows), rows


@given(st.text("ab ", max_size=8), st.text("ab ", max_size=8))
def test_to_overwrite(old: str, new: str) -> None:
    shown = overwrite(old.encode(), new.encode()).decode()
    assert shown.rstrip() == (new + old[len(new) :]).rstrip()


def test_text_without_what_is_not_text() -> None:
    link = b"\x1b]8;;http://a\x1b\\name\x1b]8;;\x1b\\"
    assert plain(b"\x1b[1;31mred\x1b[0m \x1b[2K" + link + b"\xff") == "red name\N{REPLACEMENT CHARACTER}"
    assert [columns(text) for text in (b"ab", b"\x1b[31mab", "日本".encode(), "é".encode(), b"\t|")] == [2, 2, 4, 1, 9]
