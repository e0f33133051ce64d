"""Trainings with sharded state: ranks die, no committed step is lost, and the result is that of an undisturbed run."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import OptionError
from phalanx.train.model.replicas import rows
from phalanx.train.snapshot.cadence import Cadence, MeasuredCopy, interval, reason
from phalanx.train.snapshot.copying import ShardCopier
from phalanx.train.snapshot.found import Division, division
from tests.kit.cli import Env, Result, free_port, phalanx, start, until, warm_environment

pytestmark = pytest.mark.xdist_group("sharded")  # they share undisturbed runs
OFF = ("--snapshot-every", "off")
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "sharded.py")

# -- how often


@pytest.mark.parametrize(
    ("measured", "steps"),
    [
        ([MeasuredCopy(0.0003, 0.005, 0.010)], 1),  # 3% exactly
        ([MeasuredCopy(0.0004, 0.005, 0.010)], 2),
        ([MeasuredCopy(0.010, 0.010, 0.010)], 34),
        ([MeasuredCopy(0.0001, 0.035, 0.010)], 4),  # it is complete only during the fourth step
        ([MeasuredCopy(0.0001, 0.001, 0.010), MeasuredCopy(0.003, 0.001, 0.010)], 10),  # the slowest rank counts
        ([MeasuredCopy(0.0, 0.0, 0.0)], 1),
    ],
)
def test_snapshots_are_as_frequent_as_they_are_cheap(measured: list[MeasuredCopy], steps: int) -> None:
    assert interval(measured) == steps


def test_the_choice_is_explained_in_one_line() -> None:
    explanation = reason([MeasuredCopy(0.004, 0.01, 0.04)], 4)
    assert explanation.startswith(
        "phalanx: snapshots of the sharded state: every 4 steps (each costs 4.0 ms, a step takes "
    )
    assert "40.0 ms: 2.5% of the time, at most 3% allowed" in explanation
    assert "every step (" in reason([MeasuredCopy(0.001, 0.01, 0.04)], 1)
    assert "\n" not in explanation


class Measuring:
    """Steps of 100 ms with snapshots that hold the training for `cost`, and slow it down by `beside`."""

    def __init__(self, cost: float, beside: float = 0.0, duration: float = 0.01) -> None:
        self.cost, self.beside, self.duration = cost, beside, duration
        self.now, self.held = 0.0, 0.0
        self.costs: list[float] = []
        self.durations: list[float] = []
        self.messages: list[str] = []
        self.steps = 0
        self.group: Any = SimpleNamespace(is_main=True, gather=lambda mine, **_: [mine])
        self.cadence = Cadence(self, self.messages.append, clock=lambda: self.now, training=id(self))  # type: ignore[arg-type]

    def saved(self, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            self.now += 0.1
            self.steps += 1
            if self.cadence.passed(self.steps, self.group):
                found.append(self.steps)
                self.now += self.cost + self.beside
                self.held += self.cost
                self.costs.append(self.cost)
                self.durations.append(self.duration)
        return found


def test_a_snapshot_that_is_complete_at_once_is_taken_every_step() -> None:
    cheap = Measuring(0.001, duration=0.002)
    assert cheap.saved(200) == list(range(1, 201))


def test_every_step_at_first_then_steps_with_and_without_one_are_compared() -> None:
    dear = Measuring(0.012)
    first, compared = [1, 2, 3, 4, 5, 6], [7, 9, 11, 13, 15, 17]
    assert dear.saved(30) == [*first, *compared, 19, 23, 27]  # 12 of 400 ms
    assert len(dear.messages) == 1
    dear.costs[:], dear.cost = [], 0.001  # reviewed later: it has become cheap
    assert dear.saved(70)[-3:] == [98, 99, 100]
    assert len(dear.messages) == 1


def test_what_a_snapshot_takes_from_the_training_beside_it_counts() -> None:
    hidden = Measuring(0.001, beside=0.008)  # the training thread never waits, but its steps take 8% longer
    assert hidden.saved(30)[-3:] == [22, 25, 28]
    assert "each costs 9.0 ms, a step takes 100.0 ms: 3.0% of the time" in hidden.messages[0]


def test_reviews_become_less_frequent() -> None:
    cheap = Measuring(0.001)
    left_out = {*range(1, 5001)} - {*cheap.saved(5000)}
    assert 6 <= len(left_out) <= 6 * 8  # in each review, every second step of twelve


# -- copies during the training


class Slow:
    """A part whose copy is done when it is allowed."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.seen: list[str] = []

    def start(self) -> None:
        self.seen.append("start")

    def copy(self) -> None:
        assert self.allowed.wait(20)
        self.seen.append("copy")


def test_shards_are_copied_between_the_next_forward_and_its_update() -> None:
    with ThreadPoolExecutor(1) as thread:
        copying, writer = ShardCopier(thread, shares_cores=True), Slow()
        copying.begin()
        job = copying.later(writer, lambda: writer.seen.append("finish"))  # type: ignore[arg-type]
        assert writer.seen == []  # a script may still change them
        copying.forward()
        assert writer.seen == ["start"]
        threading.Timer(0.05, writer.allowed.set).start()
        copying.update()
        assert writer.seen[1] == "copy"
        job.result(20)
        assert writer.seen == ["start", "copy", "finish"]
        copying.end()
        assert copying.held >= 0.04
        assert copying.costs[0] >= copying.held
        assert copying.durations[0] >= 0.04
        copying.forward()
        copying.update()  # nothing is left to do
        assert len(writer.seen) == 3


def test_an_update_without_a_forward_waits_for_the_copy_too() -> None:
    with ThreadPoolExecutor(1) as thread:
        copying, writer = ShardCopier(thread, shares_cores=False), Slow()
        writer.allowed.set()
        copying.later(writer, lambda: None)  # type: ignore[arg-type]
        copying.update()
        assert writer.seen == ["start", "copy"]


def test_a_copy_that_fails_blocks_no_rank() -> None:
    with ThreadPoolExecutor(1) as thread:
        copying, writer = ShardCopier(thread, shares_cores=False), Slow()
        writer.copy = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        job = copying.later(writer, lambda: None)  # type: ignore[arg-type]
        copying.update()
        assert isinstance(job.exception(20), ZeroDivisionError)


# -- real ranks


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with warm_environment("torch.distributed.checkpoint", "torch.distributed.fsdp") as env:
        yield env


class Trainings:
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
                self.trained(Path(folder), how, ranks=ranks, options=OFF)
                self._ends[how, ranks] = ended(Path(folder), ranks)[1]
        return self._ends[how, ranks]


@pytest.fixture(scope="module")
def trainings(env: Env) -> Trainings:
    return Trainings(env)


def ended(folder: Path, ranks: int = 2) -> tuple[list[str], Any]:
    """Return where the ranks began each time, and their final state; rank 0 was there from the start to the end."""
    begun = [(folder / f"begun.{rank}").read_text().splitlines() for rank in range(ranks)]
    ends = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]
    assert all(one == begun[0] for one in begun)
    assert all(one == ends[0] for one in ends)
    return begun[0], ends[0]


def test_a_lost_shard_costs_no_committed_step(tmp_path: Path, trainings: Trainings) -> None:
    """With default settings: the first snapshots are at every step."""
    done = trainings.trained(tmp_path, "fsdp", [5, 1, "backward"])
    assert ended(tmp_path) == (["0 new 2", "5 memory 2"], trainings.undisturbed("fsdp"))
    assert "steps done again" not in done.err


@pytest.mark.extended
def test_a_rank_that_dies_before_its_copy_leads_all_to_the_step_before(tmp_path: Path, trainings: Trainings) -> None:
    trainings.trained(tmp_path, "fsdp keep", [4, 0, "commit"])
    assert ended(tmp_path) == (["0 new 2", "3 memory 2"], trainings.undisturbed("fsdp"))


@pytest.mark.extended
def test_an_interval_that_was_asked_for_wins(tmp_path: Path, trainings: Trainings) -> None:
    done = trainings.trained(tmp_path, "fsdp", [7, 1, "backward"], options=("--snapshot-every", "2"))
    assert ended(tmp_path) == (["0 new 2", "6 memory 2"], trainings.undisturbed("fsdp"))
    assert "snapshots of the sharded state" not in done.err


@pytest.mark.extended
def test_a_lost_shard_comes_from_its_replica(tmp_path: Path, trainings: Trainings) -> None:
    """Also one after another, wherever it dies; with either order of `run.keep` and `run.wrap`."""
    done = trainings.trained(tmp_path, "hsdp", [5, 3, "backward"], [9, 0, "backward"], ranks=4, options=OFF)
    begun = ["0 new 4", "5 living 4", "9 living 4"]
    assert ended(tmp_path, 4) == (begun, trainings.undisturbed("hsdp", 4))
    assert done.err.count("no step lost") == 2


@pytest.mark.extended
def test_survivors_that_were_prepared_commit_a_step_that_others_have_committed(
    tmp_path: Path, trainings: Trainings
) -> None:
    """Otherwise half of the shards would be of step 5 and half of step 6, and neither complete."""
    done = trainings.trained(tmp_path, "hsdp", [5, 0, "prepared"], [9, 3, "prepared"], ranks=4, options=OFF)
    assert ended(tmp_path, 4) == (["0 new 4", "6 living 4", "10 living 4"], trainings.undisturbed("hsdp", 4))
    assert done.err.count("no step lost") == 2


@pytest.mark.extended
def test_a_model_that_is_half_sharded_is_no_state(tmp_path: Path, trainings: Trainings) -> None:
    """A checkpoint is restored as a whole. Ranks 0 and 2 have the same shard of it, rank 1 dies, and the optimizer of
    rank 3 has other parameters than its model.
    """
    first, then, saved = tmp_path / "first", tmp_path / "then", tmp_path / "checkpoints"
    first.mkdir()
    then.mkdir()
    options = (*OFF, "--checkpoints", str(saved), "--checkpoint-every", "5")
    trainings.trained(first, "hsdp keep", ranks=4, options=options)
    shutil.rmtree(max(saved.glob("step-*")))
    done = trainings.trained(then, "hsdp keep", [15, 1, "wrapping"], ranks=4, options=options)
    assert "rank 3 failed" not in done.err
    begun = [(then / f"begun.{rank}").read_text().splitlines() for rank in range(4)]
    assert begun == [["15 new 4"] * (2 if rank in (0, 2) else 1) for rank in range(4)]
    assert ended(first, 4)[1] == trainings.undisturbed("hsdp", 4)
    ends = [json.loads((then / f"end.{rank}").read_text()) for rank in range(4)]
    assert ends == [trainings.undisturbed("hsdp", 4)] * 4


@pytest.mark.extended
def test_every_shard_may_be_lost_once_at_the_same_time(tmp_path: Path, trainings: Trainings) -> None:
    faults = ([5, 0, "backward"], [5, 3, "backward"])
    trainings.trained(tmp_path, "hsdp keep", *faults, ranks=4, options=OFF)
    assert ended(tmp_path, 4) == (["0 new 4", "5 living 4"], trainings.undisturbed("hsdp", 4))


@pytest.mark.extended
@pytest.mark.parametrize(("how", "ranks"), [("hsdp", 4), ("fsdp", 2)])
def test_a_rank_dies_before_shards_are_restored(tmp_path: Path, trainings: Trainings, how: str, ranks: int) -> None:
    """The others have not touched what they had, and the snapshot is still there."""
    faults = ([5, 1, "backward"], [5, 0, "kept"])
    options = OFF if how == "hsdp" else ()
    done = trainings.trained(tmp_path, f"{how} keep", *faults, ranks=ranks, options=options)
    source = "living" if how == "hsdp" else "memory"
    assert ended(tmp_path, ranks) == ([f"0 new {ranks}", f"5 {source} {ranks}"], trainings.undisturbed(how, ranks))
    assert "steps done again" not in done.err


@pytest.mark.extended
def test_both_replicas_of_a_shard_are_lost(tmp_path: Path, trainings: Trainings) -> None:
    faults = ([5, 1, "backward"], [5, 3, "backward"])
    trainings.trained(tmp_path, "hsdp", *faults, ranks=4, options=("--snapshot-every", "3"))
    begun, end = ended(tmp_path, 4)
    assert begun == ["0 new 4", "4 memory 4"]  # the third was left out while its memory was made
    assert end == trainings.undisturbed("hsdp", 4)


def lose_a_node(folder: Path, trainings: Trainings, how: str, options: tuple[str, ...] = ()) -> tuple[list[str], Any]:
    """Two nodes of two ranks, of which the second is killed when step 5 is committed."""
    where = ("-n", "1:2", "--last-call", "60s", "-g", "2,2", "--master", f"127.0.0.1:{free_port()}", "--cpu", *options)
    what = (SCRIPT, str(folder), how, '[[5, 3, "node"]]')
    jobs = [start("run", *where, "-i", str(node), *what, env=trainings.env) for node in range(2)]
    until((folder / "fault 0").exists, 60, "step 5")
    jobs[1].signal(signal.SIGKILL)
    assert [job.wait(120) for job in jobs] == [0, -signal.SIGKILL], "\n".join(job.both for job in jobs)
    return ended(folder)


@pytest.mark.extended
@pytest.mark.parametrize("how", ["hsdp", "hsdp keep"])
def test_a_lost_node_is_a_lost_replica(tmp_path: Path, trainings: Trainings, how: str) -> None:
    """The two remaining ranks have a replica each, from their own state; then no shard is at risk either."""
    begun, (steps, _, values) = lose_a_node(tmp_path, trainings, how, OFF)
    assert begun == ["0 new 4", "5 living 2"]
    theirs = trainings.undisturbed("hsdp", 4)
    assert (steps, values) == (theirs[0], pytest.approx(theirs[2], rel=1e-4, abs=1e-6))


@pytest.mark.extended
def test_shards_of_a_lost_node_come_from_its_partner_without_a_lost_step(tmp_path: Path, trainings: Trainings) -> None:
    begun, (steps, _, values) = lose_a_node(tmp_path, trainings, "fsdp")
    assert begun == ["0 new 4", "5 memory 2"]
    theirs = trainings.undisturbed("fsdp")
    assert (steps, values) == (theirs[0], pytest.approx(theirs[2], rel=1e-4, abs=1e-6))


# -- how ranks are arranged

ONE, EVEN, UNEVEN, DEALT = [range(4)], [(0, 1), (2, 3)], [(0, 1), (2,)], [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("nodes", "shards", "arranged"),
    [
        (ONE, None, ((0, 1), (2, 3))),
        (ONE, 1, ((0,), (1,), (2,), (3,))),
        (ONE, 4, ((0, 1, 2, 3),)),
        (EVEN, None, ((0, 1), (2, 3))),
        (DEALT, None, ((0, 2), (1, 3))),
        (UNEVEN, 3, ((0, 1, 2),)),
        ([(0,)], None, ((0,),)),
        ([(0,), (1,), (2,)], None, ((0,), (1,), (2,))),
    ],
)
def test_a_replica_is_a_node_or_what_was_asked_for(nodes: Any, shards: int | None, arranged: Any) -> None:
    assert rows(nodes, shards) == arranged
    assert rows(nodes, shards, elastic=True) == arranged


@pytest.mark.parametrize(
    ("nodes", "shards", "text", "left"),
    [
        ([range(3)], None, "3 ranks cannot be halved", ((0, 1, 2),)),
        (UNEVEN, None, "different numbers of ranks: 2, 1", ((0, 1, 2),)),
        ([range(6)], 4, "6 ranks cannot be divided into replicas of 4", ((0, 1, 2, 3, 4, 5),)),
        ([range(6)], 8, "6 ranks cannot be divided into replicas of 8", ((0, 1, 2, 3, 4, 5),)),
        ([range(9)], 2, "N that divides 9: 1, 3, 9", ((0, 1, 2), (3, 4, 5), (6, 7, 8))),
    ],
)
def test_what_cannot_be_arranged_is_refused_unless_ranks_were_lost(
    nodes: Any, shards: int | None, text: str, left: Any
) -> None:
    with pytest.raises(OptionError) as raised:
        rows(nodes, shards)
    assert text in str(raised.value)
    assert rows(nodes, shards, elastic=True) == left


@pytest.mark.parametrize("shards", [0, -1, 1.5])
def test_a_replica_has_shards(shards: Any) -> None:
    with pytest.raises(OptionError):
        rows(ONE, shards, elastic=True)


@pytest.mark.parametrize(
    ("replicas", "nodes", "of_rank_2"),
    [
        (((0, 1, 2, 3),), ONE, Division((0, 1, 2, 3), writes=True)),
        (((0, 1), (2, 3)), ONE, Division((0, 1, 2, 3), writes=False)),
        (((0, 1), (2, 3)), EVEN, Division((2, 3), writes=True, whole_nodes=True)),
        (((0, 2), (1, 3)), EVEN, Division((0, 1, 2, 3))),
        (((0, 1, 2, 3),), EVEN, Division((0, 1, 2, 3))),
        (((0,), (1,), (2,), (3,)), EVEN, Division((2, 3), writes=True, whole_nodes=True)),
        ((), EVEN, Division((0, 1, 2, 3))),
    ],
)
def test_each_node_keeps_a_snapshot_of_its_replica(replicas: Any, nodes: Any, of_rank_2: Division) -> None:
    assert division(replicas, nodes, 2) == of_rank_2
