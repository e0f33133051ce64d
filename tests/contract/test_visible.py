"""visible: control characters for terminals are shown as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.contract.visible import visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("node 1 (gpu-17): step 3", "node 1 (gpu-17): step 3"),
        ("Müller, 漢字, 👩‍🚀, a\u00a0b", "Müller, 漢字, 👩‍🚀, a\u00a0b"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x1b[1;1H", "\\x1b[2J\\x1b[1;1H"),
        ("50%\r100%", "50%\\r100%".replace("\\r", "\\x0d")),
        ("\x9b31m", "\\x9b31m"),
        ("user\u202e\u2066txt", "user\\u202e\\u2066txt"),
        ("one\u2028two", "one\\u2028two"),
        ("\udcff", "\udcff"),  # a byte of a file name: printed unchanged
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


def test_one_line() -> None:
    assert visible_line("a\nphalanx: b\t\x1b") == "a\\nphalanx: b\\t\\x1b"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert not [char for char in visible(text) if (char < " " and char not in "\t\n") or "\x7f" <= char <= "\x9f"]
    assert len(visible_line(text).splitlines()) < 2
