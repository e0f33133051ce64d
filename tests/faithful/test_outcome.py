"""What counts as a difference: tables, without processes."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from tests.faithful import known
from tests.faithful.kinds import BY_NAME, KINDS
from tests.faithful.outcome import Difference, Outcome, content, diff, differences, files, mask, shown, worker_code

REPORT = """
Failures:
[1]:
  exitcode  : -15 (pid: 71)
Root Cause (first observed failure):
[0]:
  exitcode  : {} (pid: 70)
"""


@pytest.mark.parametrize(
    ("code", "report", "expected"),
    [
        (0, "", 0),
        (1, "", 1),  # torchrun itself failed
        (1, REPORT.format(3), 3),
        (1, REPORT.format(-9), 137),
        (2, REPORT.format(3), 2),  # not a code that torchrun reports for a worker
    ],
)
def test_the_code_of_the_worker_that_failed_first(code: int, report: str, expected: int) -> None:
    assert worker_code(code, report) == expected


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (Outcome(0, {"rank 0 stdout": "a\nb"}, {"log.csv": "1"}), []),
        (Outcome(1, {"rank 0 stdout": "a\nb"}, {"log.csv": "1"}), ["exit code"]),
        (Outcome(0, {"rank 0 stdout": "b\na"}, {"log.csv": "1"}), ["rank 0 stdout"]),
        (Outcome(0, {"rank 0 stdout": "a\nb"}, {"log.csv": ""}), ["file log.csv"]),
        (Outcome(0, {"rank 0 stdout": "a\nb"}), ["file log.csv"]),
        (Outcome(0, {"rank 0 stdout": "a\nb"}, {"log.csv": "1", "more": ""}), ["file more"]),
        (Outcome(None), ["exit code"]),
    ],
)
def test_differences(ours: Outcome, expected: list[str]) -> None:
    theirs = Outcome(0, {"rank 0 stdout": "a\nb"}, {"log.csv": "1"})
    assert [one.field for one in differences(theirs, ours)] == expected


def test_a_difference_in_brief() -> None:
    difference = Difference("rank 0 stdout", diff("same\n2 DETAIL\n", "same\n1 OFF\n"))
    assert difference.brief == "-2 DETAIL | +1 OFF"
    assert difference.lines == ["2 DETAIL", "1 OFF"]
    assert Difference("file a", diff("", "-- a line\n")).lines == ["-- a line"]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("<Net at 0x7f3a2b1c>", "<Net at 0x>"),
        ("W1116 06:08:16.812000 6733 torch/x.py:874] hot", "W torch/x.py:874] hot"),
        ("connect to 127.0.0.1:34567", "connect to HOST:PORT"),
        ("loss 0.12345678901", "loss 0.12345678901"),
        ("step 12 of rank 1", "step 12 of rank 1"),
    ],
)
def test_masks_take_what_differs_in_every_run_and_leave_numbers(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_files_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    with gzip.GzipFile(tmp_path / "a.gz", "wb", mtime=5) as file:
        file.write(b"inside")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("part", "inside")
    (tmp_path / "c.zip").write_bytes(b"PK cut off")
    (tmp_path / "raw").write_bytes(b"\xff")
    (tmp_path / "link").symlink_to("raw")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_bytes(b"")
    found = files(str(tmp_path))
    assert found == {
        "a.gz": "inside",
        "b.zip": "part: inside",
        "c.zip": "BadZipFile: 10 bytes",
        "raw": "\\xff",
        "link": "-> raw",
    }
    assert list(files(str(tmp_path), ignore=("*.zip", "raw"))) == ["a.gz", "link"]
    assert content(str(tmp_path / "raw")) == "\\xff"


def test_lines_of_a_rank_on_the_console() -> None:
    assert shown("<0>a\nphalanx: something\n<1>b\n<0>\n<0>c", 0) == "a\n\nc"


def test_a_known_difference_covers_its_own_lines_only() -> None:
    frozen = Difference("rank 0 stdout", diff("a\nfrozen objects False\n", "a\nfrozen objects True\n"))
    more = Difference("rank 0 stdout", diff("a\nfrozen objects False\n", "b\nfrozen objects True\n"))
    assert known.reason("main_facts", "cold", frozen)
    assert known.reason("main_facts", "cold", more) is None
    assert known.reason("csv_log", "cold", frozen) is None


def test_every_kind_has_its_own_name_and_a_script() -> None:
    assert len(BY_NAME) == len(KINDS) >= 60


def test_every_kind_can_be_laid_out(tmp_path: Path) -> None:
    for kind in KINDS:
        folder = tmp_path / kind.name
        kind.lay_out(str(folder))
        target = kind.command[1].replace(".", "/") + ".py" if kind.command[0] == "-m" else kind.command[0]
        assert (folder / target).exists(), kind.name
