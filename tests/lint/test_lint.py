"""The command: what it reads, its output, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.errors import ScriptError
from phalanx.lint.inspection import inspect, inspect_all
from tests.kit.cli import phalanx
from tests.lint.snippets.scripts import BAD, script

ROOT = Path(__file__).parents[2]
WRONG = script(BAD["rank-collective"]["under a condition"])


@pytest.mark.checkout
def test_our_own_examples_are_clean() -> None:
    """Except the one that hangs on purpose."""
    report = inspect_all([str(ROOT / "examples"), str(ROOT / "benchmarks/scripts"), str(ROOT / "src/phalanx/demo")])
    assert {(one.file, one.rule) for one in report.findings} == {(str(ROOT / "examples/hang.py"), "rank-collective")}
    assert report.unreadable == ()
    assert report.files > 20


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRONG)
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "other.py").write_text("no Python")
    result = phalanx("lint", "train.py", "model.py", cwd=str(tmp_path))
    line = next(number for number, text in enumerate(WRONG.splitlines(), 1) if text.endswith("# !"))
    assert result.code == 1
    assert result.err == ""
    assert result.out == (
        f"train.py:{line}: error [rank-collective]\n"
        f"  only ranks with `rank == 0` (line {line - 1}) come to it: all_reduce waits forever for the others\n"
        "  fix: call all_reduce on every rank, outside the condition\n"
        "\n1 error in 2 files\n"
    )

    (tmp_path / "old.py").write_text("print 'hello'\n")
    result = phalanx("lint", "--json", str(tmp_path))
    facts = json.loads(result.out)
    assert result.code == 2
    assert facts["files"] == 2
    assert [(one["file"], one["line"], one["rule"], one["level"]) for one in facts["findings"]] == [
        (str(tmp_path / "train.py"), line, "rank-collective", "error")
    ]
    assert [one["file"] for one in facts["unreadable"]] == [str(tmp_path / "old.py")]
    assert facts["unreadable"][0]["why"].startswith("line 1: not Python: ")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="there is no file or folder") as missing:
        inspect_all([str(tmp_path / "train.py")])
    assert missing.value.exit_code == 2
    with pytest.raises(ScriptError, match="there is no Python file in"):
        inspect_all([str(tmp_path)])


@pytest.mark.parametrize("content", [b"\x00", b"\xff\xfe\x00", b"# coding: none\n", b"(" * 5000], ids=str)
def test_files_that_cannot_be_parsed_are_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.py").write_bytes(content)
    report = inspect_all([str(tmp_path)])
    assert [file for file, _ in report.unreadable] == [str(tmp_path / "train.py")]


def test_a_comment_in_a_string_silences_nothing() -> None:
    text = WRONG.replace("dist.all_reduce(x)", 'dist.all_reduce(x, "# phalanx: ignore")')
    assert [one.rule for one in inspect(text)] == ["rank-collective"]
    other = WRONG.replace("# !", "# phalanx: ignore[rank-group]")
    assert [one.rule for one in inspect(other)] == ["rank-collective"]
