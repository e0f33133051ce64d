"""Trainings whose state is sharded: ranks die, no committed step is lost, and the end is that of an undisturbed run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.train.snapshot.cadence import Cadence, Measured, interval, reason
from tests.kit.cli import Env, Result, phalanx, stage

pytestmark = pytest.mark.xdist_group("sharded")  # they share undisturbed runs
SCRIPT = str(Path(__file__).parent / "scripts" / "sharded.py")

# -- how often


@pytest.mark.parametrize(
    ("measured", "steps"),
    [
        ([Measured(0.0003, 0.005, 0.010)], 1),  # 3% exactly
        ([Measured(0.0004, 0.005, 0.010)], 2),
        ([Measured(0.010, 0.010, 0.010)], 34),
        ([Measured(0.0001, 0.035, 0.010)], 4),  # it is complete only during the fourth step
        ([Measured(0.0001, 0.001, 0.010), Measured(0.003, 0.001, 0.010)], 10),  # the slowest rank counts
        ([Measured(0.0, 0.0, 0.0)], 1),
    ],
)
def test_snapshots_are_as_frequent_as_they_are_cheap(measured: list[Measured], steps: int) -> None:
    assert interval(measured) == steps


def test_the_choice_is_explained_in_one_line() -> None:
    told = reason([Measured(0.004, 0.01, 0.04)], 4)
    assert told.startswith("phalanx: snapshots of the sharded state: every 4 steps (each costs 4.0 ms, a step takes ")
    assert "40.0 ms: 2.5% of the time, at most 3% allowed" in told
    assert "every step (" in reason([Measured(0.001, 0.01, 0.04)], 1)
    assert "\n" not in told


class Measuring:
    """Steps of 100 ms with snapshots that hold the training for `cost`."""

    def __init__(self, cost: float) -> None:
        self.cost, self.now, self.held = cost, 0.0, 0.0
        self.costs: list[float] = []
        self.durations: list[float] = []
        self.said: list[str] = []
        self.run = SimpleNamespace(steps=0, is_main=True, training=id(self), gather=lambda mine, **_: [mine])
        self.cadence = Cadence(self, self.said.append, clock=lambda: self.now)  # type: ignore[arg-type]

    def saved(self, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            self.now += 0.1
            self.run.steps += 1
            if self.cadence.passed(self.run):  # type: ignore[arg-type]
                found.append(self.run.steps)
                self.now += self.cost
                self.held += self.cost
                self.costs.append(self.cost)
                self.durations.append(0.01)
        return found


def test_every_step_at_first_and_then_what_was_measured() -> None:
    cheap = Measuring(0.002)
    assert cheap.saved(100) == list(range(1, 101))
    dear = Measuring(0.012)
    assert dear.saved(30) == [1, 2, 3, 4, 5, 6, 7, 11, 15, 19, 23, 27]
    assert len(dear.said) == 1
    dear.costs[:], dear.cost = [], 0.001  # looked at again later: it has become cheap
    assert dear.saved(60)[-3:] == [88, 89, 90]
    assert len(dear.said) == 1


# -- real ranks


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with stage("torch.distributed.checkpoint", "torch.distributed.fsdp") as env:
        yield env


class Play:
    def __init__(self, env: Env) -> None:
        self.env = env
        self._ends: dict[tuple[str, int], Any] = {}

    def trained(
        self,
        folder: Path,
        how: str,
        *faults: list[Any],
        ranks: int = 2,
        options: tuple[str, ...] = (),
        shards: str = "",
    ) -> Result:
        words = ("run", "-g", str(ranks), "--cpu", *options, SCRIPT, str(folder), how, json.dumps(faults))
        done = phalanx(*words, *filter(None, [shards]), env=self.env, timeout=150)
        assert done.code == 0, done.err
        return done

    def undisturbed(self, how: str, ranks: int = 2) -> Any:
        if (how, ranks) not in self._ends:
            with tempfile.TemporaryDirectory() as folder:
                self.trained(Path(folder), how, ranks=ranks, options=("--snapshot-every", "off"))
                self._ends[how, ranks] = ended(Path(folder), ranks)[1]
        return self._ends[how, ranks]


@pytest.fixture(scope="module")
def play(env: Env) -> Play:
    return Play(env)


def ended(folder: Path, ranks: int = 2) -> tuple[list[str], Any]:
    """Where the ranks began, each time, and what they had in the end; rank 0 was there from the start to the end."""
    begun = [(folder / f"begun.{rank}").read_text().splitlines() for rank in range(ranks)]
    ends = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]
    assert all(one == begun[0] for one in begun)
    assert all(one == ends[0] for one in ends)
    return begun[0], ends[0]


def test_a_lost_shard_costs_no_committed_step(tmp_path: Path, play: Play) -> None:
    """With default settings: the first snapshots are at every step."""
    done = play.trained(tmp_path, "fsdp", [5, 1, "backward"])
    assert ended(tmp_path) == (["0 new 2", "5 memory 2"], play.undisturbed("fsdp"))
    assert "steps done again" not in done.err
    assert done.err.count("snapshots of the sharded state: every") == 1


def test_a_rank_that_dies_before_its_copy_leads_all_to_the_step_before(tmp_path: Path, play: Play) -> None:
    play.trained(tmp_path, "fsdp keep", [4, 0, "commit"])
    assert ended(tmp_path) == (["0 new 2", "3 memory 2"], play.undisturbed("fsdp"))


def test_an_interval_that_was_asked_for_wins(tmp_path: Path, play: Play) -> None:
    done = play.trained(tmp_path, "fsdp", [7, 1, "backward"], options=("--snapshot-every", "2"))
    assert ended(tmp_path) == (["0 new 2", "6 memory 2"], play.undisturbed("fsdp"))
    assert "snapshots of the sharded state" not in done.err
