"""Which streams are shown: torchrun's forms, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launcher.output.filters import Duplicate, Std, duplicated, shown

NOTHING: dict[int, Std] = {}


@pytest.mark.parametrize(
    ("redirects", "tee", "expected"),
    [
        (Std.NONE, Std.NONE, Std.ALL),
        (Std.ALL, Std.NONE, Std.NONE),
        (Std.OUT, Std.NONE, Std.ERR),
        (Std.NONE, Std.ALL, Std.ALL),
        (Std.ALL, Std.ALL, Std.ALL),  # tee wins
        (Std.ALL, Std.ERR, Std.ERR),
        (Std.OUT, Std.OUT, Std.ALL),
    ],
)
def test_redirected_is_not_shown_unless_teed(redirects: Std, tee: Std, expected: Std) -> None:
    assert shown(1, 5, redirects={1: redirects}, tee={1: tee}) == expected


def test_filters_by_local_and_by_global_rank() -> None:
    def seen(local_rank: int, rank: int, **filters: set[int]) -> Std:
        return shown(local_rank, rank, redirects=NOTHING, tee={local_rank: Std.ALL}, **filters)

    assert seen(0, 8, local_ranks={0, 1}) == Std.ALL
    assert seen(2, 0, local_ranks={0, 1}) == Std.NONE
    assert seen(0, 8, ranks={0, 8}) == Std.ALL
    assert seen(1, 9, ranks={0, 8}) == Std.NONE
    assert seen(0, 8, ranks={8}, local_ranks={1}) == Std.NONE
    assert seen(3, 9, ranks=set(), local_ranks=set()) == Std.ALL


def test_only_what_is_teed_is_duplicated() -> None:
    assert duplicated(0, tee={0: Std.OUT}) == Std.OUT
    assert duplicated(1, tee={0: Std.OUT}) == Std.NONE
    assert duplicated(0, tee={0: Std.OUT}, local_ranks={1}) == Std.NONE


LINES = st.lists(st.text("ab\nX\r", max_size=12), max_size=8).map(lambda parts: [p.encode() for p in parts])


@given(LINES)
def test_duplicates_do_not_depend_on_chunks(chunks: list[bytes]) -> None:
    whole, pieces = Duplicate(["X", "ab"], "[r0]:"), Duplicate(["X", "ab"], "[r0]:")
    text = b"".join(chunks)
    in_pieces = b"".join(pieces.feed(chunk) for chunk in chunks) + pieces.end()
    assert in_pieces == whole.feed(text) + whole.end()
    expected = [line for line in text.decode().splitlines() if "X" in line or "ab" in line]
    assert in_pieces == "".join(f"[r0]:{line}\n" for line in expected).encode()


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    duplicate = Duplicate(["needle"], "")
    found = [duplicate.feed(b"x" * 65536 + b"needle") for _ in range(64)]
    assert sum(len(lines) for lines in found) > 3 << 20
