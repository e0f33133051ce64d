"""Ranks die, and the training goes on: real processes, real signals. Undisturbed runs are the oracle."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from phalanx.contract import events
from tests.kit.cli import Result, phalanx

pytestmark = pytest.mark.xdist_group("survive")  # they share an undisturbed run
SCRIPT = str(Path(__file__).parent / "scripts" / "survive.py")
STEPS = 24


def trained(folder: Path, ranks: int, *faults: list[Any], options: tuple[str, ...] = ()) -> Result:
    return phalanx("run", "-g", str(ranks), "--cpu", *options, SCRIPT, str(folder), json.dumps(faults))


@functools.cache
def undisturbed(ranks: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        done = trained(Path(folder), ranks)
        assert done.code == 0, done.err
        return ended(Path(folder), ranks)[0]


def ended(folder: Path, ranks: int) -> tuple[dict[str, list[float]], int]:
    """The parameters, which all ranks have alike, and the generation. Every sample was committed once an epoch."""
    (steps, generation, end), *others = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]
    assert all(other == [steps, generation, end] for other in others)
    assert steps == STEPS
    for epoch in range(3):
        each = range(1 + epoch * STEPS // 3, 1 + (epoch + 1) * STEPS // 3)
        taken = [json.loads((folder / f"{step}.{rank}").read_text()) for step in each for rank in range(ranks)]
        assert sorted(place for places in taken for place in places) == list(range(96))
    return end, generation


def equal(ours: dict[str, list[float]], theirs: dict[str, list[float]], ranks: int) -> bool:
    """With two ranks to the bit. With more gloo adds up in an order that depends on how DDP has laid out its buckets,
    which it does anew in a new group."""
    if ranks == 2:
        return ours == theirs
    return ours == {name: pytest.approx(values, rel=1e-4, abs=1e-6) for name, values in theirs.items()}


@pytest.mark.parametrize("how", ["kill", "segv", "exit", "raise"])
def test_a_dead_rank_costs_no_step(tmp_path: Path, how: str) -> None:
    done = trained(tmp_path, 2, [5, 1, how])
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 2)
    assert (end, generation) == (undisturbed(2), 1)
    assert re.search(r"rank 1 failed; regrouped, and step 6 was committed [\d.]+ s later, no step lost", done.err)
    assert "1 fault survived" in done.err


def test_rank_0_is_not_sacred_and_faults_may_follow_each_other(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [3, 0, "kill"], [4, 1, "kill"], [4, 0, "exit"], [11, 0, "kill"])
    assert done.code == 0, done.err
    assert ended(tmp_path, 2) == (undisturbed(2), 4)


@pytest.mark.parametrize("where", ["backward", "handover"])
def test_wherever_it_dies(tmp_path: Path, where: str) -> None:
    """A rank that dies when others may have committed; one that dies while it is given the state."""
    faults = [[7, 1, "kill", "backward"]] if where == "backward" else [[6, 1, "kill"], [0, 1, "kill", "handover"]]
    done = trained(tmp_path, 3, *faults)
    assert done.code == 0, done.err
    end, generation = ended(tmp_path, 3)
    assert generation == len(faults)
    assert equal(end, undisturbed(3), 3)


def test_two_at_once_and_all_at_once(tmp_path: Path) -> None:
    done = trained(tmp_path, 3, [5, 0, "kill"], [5, 2, "kill"])
    assert done.code == 0, done.err
    assert equal(ended(tmp_path, 3)[0], undisturbed(3), 3)


def test_all_at_once_begin_again(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [5, 0, "kill"], [5, 1, "kill"])
    assert done.code == 0, done.err
    assert ended(tmp_path, 2)[0] == undisturbed(2)


def test_a_crash_that_only_repeats_ends_the_run(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [5, 1, "always"])
    assert done.code == 1
    assert "rank 1 failed: ValueError: a broken sample" in done.err
    assert "the same crash 3 times in a row" in done.err


@pytest.mark.parametrize(("most", "code"), [("0", 137), ("1", 137), ("2", 0)])
def test_the_budget_that_was_told_is_kept(tmp_path: Path, most: str, code: int) -> None:
    done = trained(tmp_path, 2, [3, 0, "kill"], [5, 1, "kill"], options=("--max-restarts", most))
    assert done.code == code, done.err
    assert ("recoveries were allowed, and are used up" in done.err) == (most == "1")


def test_what_happened_is_in_the_events(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [5, 1, "kill"])
    folder = Path(re.findall(r"output in (\S+)", done.err)[0])
    told = [events.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    (fault,) = [event for event in told if isinstance(event, events.Fault)]
    (recovered,) = [event for event in told if isinstance(event, events.Recovered)]
    assert (fault.rank, fault.recovery) == (1, "regroup")
    assert (recovered.generation, recovered.step, recovered.redone) == (1, 6, 0)
    assert 0 < recovered.seconds < 30
