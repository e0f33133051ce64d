"""Text that is not valid Unicode, in events and messages."""

from __future__ import annotations

import pytest

from phalanx.contract import encoding, events


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("café", "café"),
        ("a\udcff.py", "a\\xff.py"),
        ("\udcc3\udca9", "é"),  # read by an interpreter whose file system encoding is ASCII
        ("\ud800", "\\ud800"),  # does not represent a byte
    ],
)
def test_what_is_not_unicode_is_written_as_bytes(text: str, written: str) -> None:
    event = events.RunStarted(time=0.0, run="r", command=("python", text), world_size=1, pid=1)
    decoded = events.decode(events.encode(event))
    assert isinstance(decoded, events.RunStarted)
    assert decoded.command == ("python", written)


def test_every_part_of_a_message_is_made_valid() -> None:
    assert encoding.encode({"\udcff": ["\udcfe", {"a": ("\udcfd", 1, None)}]}) == (
        rb'{"\\xff":["\\xfe",{"a":["\\xfd",1,null]}]}'
    )
