"""A tenth of the faults on one host, with the seed of the whole campaign: `make chaos` runs all of it.

Faults of nodes are in tests/e2e/recovery/test_elastic.py.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.contract import events
from tests.chaos import campaign, oracle, placed
from tests.chaos.campaign import Kind, Round, RoundResult
from tests.chaos.kinds import KINDS, OF_NODES
from tests.kit.cli import Env

SEED, SHARE = 1, 0.1


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in KINDS if name not in OF_NODES])
def test_a_tenth_of_the_campaign(name: str) -> None:
    kind = KINDS[name]
    outcome = campaign.run(kind, SEED, enumerate(kind.rounds(SHARE)))
    assert not outcome.violations, "\n\n".join(map(str, outcome.violations))


def test_the_campaign_has_1_000_faults() -> None:
    assert sum(kind.faults for kind in KINDS.values()) == 1000
    assert KINDS["kill"].rounds(0.1) == [23]
    assert sum(KINDS["kill"].rounds(1.0)) == KINDS["kill"].faults


@pytest.mark.parametrize("plan", [placed.in_recovery, placed.at_a_save, placed.all_at_once, placed.together])
def test_a_plan_has_as_many_faults_as_asked(plan: placed.Plan) -> None:
    for count in (1, 2, 3, 8):
        faults = plan(random.Random(1), 3, count)
        assert len(faults) == count
        assert faults == plan(random.Random(1), 3, count)
        assert all(0 <= rank < 3 for _, rank, *_ in faults)


# -- a violation is detected, and named


@contextlib.contextmanager
def nothing() -> Iterator[Env]:
    with tempfile.TemporaryDirectory() as folder:
        yield {"TMPDIR": folder}


def test_a_violation_is_named_with_the_command_that_repeats_it() -> None:
    def run_round(this: Round) -> RoundResult:
        assert this.chance.randrange(10) != 3, "a wrong number"
        return RoundResult(this.faults, this.faults, [1.0] * this.faults)

    kind = Kind("example", 100, 2, run_round, "")
    outcome = campaign.run(kind, 7, enumerate(kind.rounds(1.0)), most=1, places=nothing)
    (violation,) = outcome.violations
    assert "a wrong number" in str(violation)
    assert f"--kind example --seed 7 --round {violation.number} --faults 2" in str(violation)
    assert campaign.run(kind, 7, [(violation.number, 2)], places=nothing).violations
    assert not campaign.report([outcome])


def test_a_fault_that_was_not_recovered_is_a_violation() -> None:
    kind = Kind("example", 1, 1, lambda this: RoundResult(this.faults, 0), "")
    (violation,) = campaign.run(kind, 1, [(0, 1)], places=nothing).violations
    assert "0 of 1 faults were recovered" in violation.trace


def test_a_slow_recovery_is_shown_with_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = [
        events.NoteEvent(time=at, text=text) for at, text in ((50.0, "before"), (101.0, "forms"), (190.0, "after"))
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(events.encode, notes)))
    err = f"phalanx: x: 2 ranks, output in {tmp_path}\n"
    assert oracle.slow(err, [10.0, 100.0], [1.0, 2.0]) == []
    result = RoundResult(2, 2, [1.0, 84.0], oracle.slow(err, [10.0, 100.0], [1.0, 84.0]))
    outcome = campaign.run(Kind("example", 2, 2, lambda _: result, ""), 1, [(4, 2)], places=nothing)
    assert campaign.report([outcome])
    text = capsys.readouterr().out
    assert "slow: example, seed 1, round 4: a recovery took 84.0 s" in text
    assert "+1.00" in text
    assert "forms" in text
    assert "before" not in text
    assert "after'" not in text


def write(folder: Path, rank: int, *lines: tuple[float, str, int, list[int] | None]) -> None:
    with open(folder / f"log.{rank}", "a") as file:
        for time, group, step, taken in lines:
            more = {"taken": taken, "size": 2} if taken is not None else {}
            file.write(json.dumps({"time": time, "group": group, "step": step, **more}) + "\n")


def epoch(folder: Path, group: str) -> None:
    for step in range(1, 9):
        for rank in range(2):
            places = list(range((step - 1) * 12 + rank * 6, (step - 1) * 12 + rank * 6 + 6))
            write(folder, rank, (step, group, step, places), (step + 0.5, group, step, None))


def test_a_sample_that_counts_twice_or_never_is_found(tmp_path: Path) -> None:
    epoch(tmp_path, "0")
    oracle.check_samples(oracle.read(tmp_path)[0], 8)
    # Step 3 again, in another group: the samples of that group count, whatever the first did.
    for rank, places in enumerate((range(24, 30), range(30, 36))):
        write(tmp_path, rank, (9.0, "1", 3, list(places)))
    oracle.check_samples(oracle.read(tmp_path)[0], 8)
    write(tmp_path, 0, (10.0, "2", 3, list(range(24, 30))))
    with pytest.raises(AssertionError, match="step 3: 1 of 2 ranks took part"):
        oracle.check_samples(oracle.read(tmp_path)[0], 8)
    write(tmp_path, 1, (10.0, "2", 3, list(range(24, 30))))
    with pytest.raises(AssertionError, match="epoch 1"):
        oracle.check_samples(oracle.read(tmp_path)[0], 8)


def test_a_delay_ends_with_the_first_step_of_the_next_group(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, (1.0, "0", 1, [0]), (1.1, "0", 1, None), (2.0, "0", 2, [0]))
    write(tmp_path, 0, (2.2, "0", 2, None))  # before it detects it
    assert oracle.delay(tmp_path, 2.1, 2) is None
    for rank in range(2):
        write(tmp_path, rank, (4.0, "1", 3, [0]))
    assert oracle.delay(tmp_path, 2.1, 2) is None
    write(tmp_path, 0, (4.6, "1", 3, None))
    assert oracle.delay(tmp_path, 2.1, 2) == pytest.approx(2.5)
    assert oracle.delay(tmp_path, 2.1, 3) is None, "the group has two ranks"
    assert oracle.delay(tmp_path, 2.1, 1, regroup=False) == pytest.approx(0.1)


def test_a_delay_ends_before_the_next_fault(tmp_path: Path) -> None:
    """Rank 1 dies after the step that ends its recovery is committed, and before it has recorded that: three times."""
    for rank in range(2):
        write(tmp_path, rank, (1.0, "0", 1, [0]), (1.1, "0", 1, None))
    for group in (1, 2, 3):
        at, step = 10.0 * group, group + 1
        for rank in range(2):
            write(tmp_path, rank, (at, f"{group}", step, [0]))
        write(tmp_path, 0, (at + 0.1, f"{group}", step, None))
    faults = [(3.0, True), (10.2, True), (20.2, True)]
    assert oracle.delays(tmp_path, faults, 2) == pytest.approx([7.1, 9.9, 9.9])
