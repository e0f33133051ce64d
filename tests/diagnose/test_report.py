"""The report for people, and the JSON for programs."""

from __future__ import annotations

import json

from phalanx.diagnose import report
from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import Evidence, decode
from phalanx.diagnose.words import numbers, place, quantity
from tests.diagnose.made_evidence import behind, beside, evidence, frame, loading, process, rank

ITEM = frame("dataset.py", 41, "__getitem__", source="with self.lock:")


def locked(size: int = 8) -> Evidence:
    return beside(behind(2, loading(ITEM), proc=process(wchan="futex_do_wait"), size=size), size=size)


def test_text() -> None:
    seen = locked()
    assert report.text(seen, diagnose(seen)).splitlines() == [
        "probably: rank 2 is in data loading, dataset.py:41 in __getitem__ (waiting for a lock); "
        "the other 7 wait for it in all_reduce #214 (6.5 MB) at train.py:52",
        "  its line: with self.lock:",
        "",
        "what all ranks are doing, 40 s without progress:",
        "  rank 2: waiting for a lock at dataset.py:41 in __getitem__",
        "  ranks 0, 1, 3-7: all_reduce #214 (6.5 MB) at train.py:52",
        "",
        report.MORE,
    ]


def test_fix_and_certainty_are_reported() -> None:
    seen = beside(behind(1, [frame("train.py", 9)], proc=process("T")))
    lines = report.text(seen, diagnose(seen), more="").splitlines()
    assert lines[0].startswith("rank 1 is stopped (SIGSTOP) at train.py:9")
    assert "  fix: kill -CONT 4000" in lines
    assert lines[-2] == "  rank 1: stopped at train.py:9"


def test_a_report_without_verdicts_says_why_nothing_moves() -> None:
    seen = beside(behind(1, [frame("train.py", 9)], debugged=True))
    assert report.text(seen, []).startswith("a debugger is open in rank 1")
    seen = evidence(rank(0, [frame("train.py", 9)], since=0.1), waited=0.1)
    assert report.text(seen, diagnose(seen)).startswith(
        "nothing wrong was found\n\nwhat all ranks are doing:\n  rank 0"
    )


def test_json_holds_everything() -> None:
    seen = locked(4)
    parsed = json.loads(report.as_json(seen, diagnose(seen)))
    assert parsed["verdicts"][0]["kind"] == "data"
    assert parsed["verdicts"][0]["place"]["line"] == 41
    assert [each["ranks"] for each in parsed["places"]] == [[2], [0, 1, 3]]
    assert decode(json.dumps(parsed["evidence"]).encode()) == seen


def test_words() -> None:
    assert numbers([7, 0, 1, 3, 4, 5, 6]) == "0, 1, 3-7"
    assert numbers([]) == ""
    assert [quantity(count) for count in (12, 6_500_000, 3_200_000_000_000)] == ["12 B", "6.5 MB", "3200.0 GB"]
    assert place(frame("/a/b/__init__.py", 3)) == "b/__init__.py:3"
