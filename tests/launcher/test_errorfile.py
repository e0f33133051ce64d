"""The error file that a worker writes while its interpreter reports an exception."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.forkserver.child import error_file
from phalanx.launcher.output.tracebacks import read_error_file


def written(path: Path, error: BaseException) -> dict[str, Any]:
    try:
        raise error
    except BaseException:
        error_file.write(str(path), *sys.exc_info())
    return json.loads(path.read_text())  # type: ignore[no-any-return]


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Mute("a"), "Mute: <exception str() failed>"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("a\nb"), "ValueError: a\nb"),
        (ValueError("\udcff"), "ValueError: \udcff"),
    ],
    ids=["broken __str__", "no message", "two lines", "no text"],
)
def test_whatever_an_exception_says_is_read_again(tmp_path: Path, error: BaseException, text: str) -> None:
    written(tmp_path / "error.json", error)
    found = read_error_file((tmp_path / "error.json").read_text())
    assert found.exception == text
    assert found.when is not None
    assert found.frames[-1][2] == "written"


def test_a_syntax_error_is_shown_with_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("x = (1,\ny = 2\n", "/w/broken.py", "exec")
    record = written(tmp_path / "error.json", raised.value)
    assert record["frames"][-1] == ["/w/broken.py", 1, "", "x = (1,"]
