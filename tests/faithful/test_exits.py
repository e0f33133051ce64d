"""What counts as a wrong exit, and the report about a run that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faithful import hangs
from tests.faithful.exits import ALL, Count, End, count
from tests.faithful.outcome import Outcome
from tests.faithful.runs import Lane
from tests.kit.proc import until


@pytest.mark.parametrize(
    ("code", "hangs", "wrong"),
    [(3, 0, 0), (0, 0, 1), (137, 0, 1), (None, 1, 0)],
)
def test_outcomes_are_counted(code: int | None, hangs: int, wrong: int) -> None:
    counted = Count()
    counted.add(End("leaves", code=3), Outcome(code), "cold")
    assert (counted.runs, counted.hangs, counted.wrong, len(counted.notes)) == (1, hangs, wrong, hangs + wrong)


def test_a_run_that_does_not_end_is_ended_and_its_stacks_are_reported(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import threading\n\ndef waits():\n    threading.Event().wait()\n\nwaits()\n")
    with Lane(limit=4) as lane:
        ours, torchrun = count(End("endless", scripts=str(tmp_path), ranks=1), lane, 1, 0, ("fresh",))
        until(lambda: not hangs.inside(f"{lane.root}/endless"))  # they were killed, and may still be exiting
    assert (ours.runs, ours.hangs, torchrun.runs) == (1, 1, 0)
    assert "endless.py" in ours.notes[0]
    assert "waits" in ours.notes[0]


def test_a_slow_run_is_no_hang(tmp_path: Path) -> None:
    script = "import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end:\n    pass\n"
    (tmp_path / "slow.py").write_text(script)
    with Lane(limit=1) as lane:
        ours, _ = count(End("slow", scripts=str(tmp_path), ranks=1), lane, 1, 0, ("fresh",))
    assert (ours.runs, ours.hangs, ours.wrong) == (1, 0, 0)


def test_there_are_25_ends_with_a_script_each() -> None:
    assert len(ALL) >= 25
    assert [end.name for end in ALL if not Path(end.scripts, f"{end.name}.py").exists()] == []
