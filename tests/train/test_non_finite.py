"""A loss that is NaN or infinite: reported once, or the update is dropped, or the run stops (`--on-nan`)."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.contract import events
from phalanx.errors import NonFiniteError, OptionError
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.non_finite_guard import (
    MOST_SKIPPED,
    WINDOW,
    NonFiniteGuard,
    Policy,
    Skip,
    StopTraining,
    checked_policy,
    decide,
    describe,
    not_finite,
)
from phalanx.train.reporting.metrics import Metrics
from phalanx.train.reporting.non_finite import NonFiniteWatch
from phalanx.train.stepping.stepper import Stepper
from phalanx.watch.model.incidents import Incidents
from phalanx.watch.model.run_model import RunModel
from tests.kit.cli import Result, phalanx, warm_environment

SCRIPT = str(Path(__file__).parent / "scripts" / "non_finite.py")
BAD = [21]  # of the batch of step 3 and, an epoch later, step 9
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise an import of the optimizer sets it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_reported_once_with_the_last_good_step() -> None:
    watch = NonFiniteWatch()
    assert watch.look(1, {"loss": 0.5, "accuracy": math.nan}) == []
    (line,) = watch.look(2, {"loss": math.nan})
    assert line.startswith("loss is nan since step 2; it was 0.5 at step 1\n  fix: ")
    assert line.endswith("a checkpoint up to step 1 is good")
    assert watch.look(3, {"loss": math.inf}) == []
    assert watch.look(5, {"loss": 0.25}) == ["loss is finite again at step 5, after 3 steps"]
    (line,) = watch.look(6, {"train/Loss": -math.inf})
    assert line.startswith("train/Loss is -inf since step 6\n")
    assert "checkpoint" not in line


def test_the_metrics_of_a_training_are_watched(tmp_path: Path) -> None:
    messages: list[str] = []
    with Metrics(str(tmp_path), tensorboard=False, say=messages.append) as metrics:
        metrics.write(1, 0, {"loss": math.nan}, reported=True)
        for step, loss in enumerate((0.5, math.nan, math.nan), 2):
            metrics.write(step, 0, {"loss": loss})
    (line,) = messages
    assert line.startswith("loss is nan since step 3; it was 0.5 at step 2")


# -- the decision


@pytest.mark.parametrize(
    ("policy", "skipped", "finite", "stops"),
    [
        ("rollback", [], True, ""),
        ("rollback", [1, 2], True, ""),
        ("rollback", [97, 98, 99], True, "at most 3 batches in 100 steps; skipped: 97, 98, 99"),
        ("rollback", [200 - WINDOW, 198, 199], True, ""),  # the first one is long ago
        ("rollback", [201 - WINDOW, 198, 199], True, "skipped: 101, 198, 199"),
        ("rollback", [], False, "not finite either"),
        ("stop", [], True, "--on-nan stop"),
        ("stop", [], False, "not finite either"),
    ],
)
def test_decision(policy: Policy, skipped: list[int], finite: bool, stops: str) -> None:
    step = 100 if max(skipped, default=0) < 100 else 200
    found = decide(policy, step, skipped, state_is_finite=finite)
    if not stops:
        assert found == Skip()
    else:
        assert isinstance(found, StopTraining)
        assert stops in found.why


def test_messages_about_values_that_are_not_finite() -> None:
    assert describe([3.0, 4.0, 4.0], 4) == "the loss of rank 1 is not finite"
    assert describe([0.0, 4.0, 4.0], 4) == "the loss is not finite"
    assert describe([0.0, 0.0, 4.0], 4) == "the gradients are not finite"


def test_the_option_is_checked() -> None:
    assert checked_policy(None) == "report"
    assert checked_policy("stop") == "stop"
    with pytest.raises(OptionError, match='--on-nan is "skip", expected report, rollback or stop'):
        checked_policy("skip")


@pytest.mark.parametrize(
    ("values", "bad"),
    [
        ([], False),
        ([0.5, torch.ones(3), torch.ones(2, dtype=torch.bfloat16)], False),
        ([torch.full((3,), 3e38)], False),  # large, and finite
        ([torch.tensor(1e300, dtype=torch.float64)], False),
        ([torch.tensor([1 + 2j])], False),
        ([torch.tensor([complex(1, math.inf)])], True),
        ([math.nan], True),
        ([-math.inf], True),
        ([torch.ones(3), torch.tensor([1.0, math.inf])], True),
        ([torch.tensor([[math.nan]])], True),
        ([torch.tensor(math.nan, dtype=torch.float64)], True),
        ([torch.tensor([1, 2]), torch.empty(0)], False),
        ([torch.tensor([0.0, math.nan]).to_sparse()], True),
        ([torch.tensor([0.0, 1.0]).to_sparse()], False),
    ],
)
def test_values(values: list[Any], bad: bool) -> None:
    assert bool(not_finite(values, CPU)) is bad


class Training:
    """One process, one model with a batch normalization."""

    def __init__(self, policy: Policy = "rollback") -> None:
        self.stepper = Stepper()
        kept = KeptObjects(self.stepper)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.opt = torch.optim.Adam(self.model.parameters())
        kept.add([self.model, self.opt], {})
        self.counter = TrainingProgress()
        self.saved: list[int] = []
        self.guard = NonFiniteGuard(policy, CPU, 1, kept=kept, counter=self.counter, save=self.save)
        self.stepper.hooks.guard = self.guard
        self.stepper.hooks.before_forward.append(self.guard.before_forward)

    def save(self) -> int:
        self.saved.append(self.counter.steps)
        return self.counter.steps

    def step(self, scale: float = 1.0) -> bool:
        self.stepper.begin()
        loss = self.model(torch.randn(8, 2, generator=torch.Generator().manual_seed(self.counter.steps)) * scale).sum()
        self.guard.add_loss(loss)
        self.guard.add_metrics({"loss": loss})
        loss.backward()
        update = self.stepper.step(self.opt)
        self.counter.steps += 1
        assert update.skipped is not update.done
        return update.done

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def test_an_update_that_is_dropped_leaves_no_trace() -> None:
    training = Training()
    assert training.step()
    before, moments = training.state(), training.opt.state_dict()["state"][0]["exp_avg"].clone()
    assert not training.step(math.nan)
    assert training.guard.skipped == [2]
    assert training.guard.latest is not None
    assert training.guard.latest[0] == "the loss of rank 0 is not finite"
    for name, value in training.state().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(training.opt.state_dict()["state"][0]["exp_avg"], moments)
    assert training.step()
    assert training.guard.latest is None


def test_too_many_stop_the_run_and_the_next_one_counts_again() -> None:
    training = Training()
    training.step()
    for _ in range(MOST_SKIPPED):
        assert not training.step(math.inf)
    with pytest.raises(NonFiniteError, match=r"stopped before the update of step 5: .*") as found:
        training.step(math.nan)
    assert found.value.exit_code == 65
    assert training.saved == [4]
    assert "a checkpoint of step 4 is on the disk" in found.value.details
    assert training.guard.skipped == []
    with pytest.raises(NonFiniteError):
        training.guard.check_stopped()  # a script may catch the first


def test_a_state_that_is_not_finite_is_not_saved() -> None:
    training = Training()
    training.step()
    with torch.no_grad():
        training.model[0].weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="step 2"):
        training.step()
    assert training.saved == []


def test_what_was_skipped_is_part_of_the_state() -> None:
    training, other = Training(), Training()
    training.step(math.nan)
    other.stepper.load_state_dict(training.stepper.state_dict())
    assert other.guard.skipped == [1]
    assert "skipped" not in Stepper().state_dict()


def test_where_faults_are_shown() -> None:
    event = events.BatchSkipped(time=5.0, step=3, reason="step 3: the loss of rank 1 is not finite", seconds=0.5)
    assert events.decode(events.encode(event)) == event
    incidents, model = Incidents(), RunModel()
    for each in (events.RunStarted(time=1.0, run="a", command=(), world_size=2, pid=1), event):
        incidents.apply(each)
        model.apply(each)
    (entry,) = incidents.entries
    assert (entry.kind, entry.text, entry.seconds) == ("fault", event.reason, 0.5)
    assert entry.outcome == "the batch of step 3 was skipped"
    (line,) = model.timeline.latest
    assert (line.kind, line.text) == ("fault", f"{event.reason}; its batch was skipped")
    assert model.lost == 0.5


# -- real runs

places: dict[str, str | None] = {}  # of the warm fork server


@pytest.fixture(scope="module")
def _warm() -> Iterator[None]:
    with warm_environment("torch._dynamo") as env:
        places.update(env)
        yield
        places.clear()


def trained(folder: Path, *words: str, bad: list[int] = BAD, ranks: int = 2, options: tuple[str, ...] = ()) -> Result:
    command = ("run", "-g", str(ranks), "--cpu", *options, SCRIPT, str(folder), json.dumps(bad), *words)
    return phalanx(*command, env=places, timeout=120)


def ends(folder: Path, ranks: int = 2) -> list[Any]:
    return [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]


@cache
def oracle(how: str, ranks: int) -> list[Any]:
    """Return the states of a run whose script skips the batches itself."""
    with tempfile.TemporaryDirectory() as name:
        done = trained(Path(name), how, "oracle", ranks=ranks)
        assert done.code == 0, done.err
        return [state for _, _, state in ends(Path(name), ranks)]


def happened(done: Result) -> list[events.AnyEvent]:
    (folder,) = re.findall(r"output in (\S+)", done.err)
    return [events.decode(line) for line in (Path(folder) / "events.jsonl").read_bytes().splitlines()]


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(("how", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_rollback_is_bit_equal_to_a_run_without_the_batch(tmp_path: Path, how: str, ranks: int) -> None:
    done = trained(tmp_path, how, ranks=ranks, options=("--on-nan", "rollback"))
    assert done.code == 0, done.err
    found = ends(tmp_path, ranks)
    assert [state for _, _, state in found] == oracle(how, ranks)
    for steps, updates, _ in found:  # each batch once; those of two steps without an update
        assert (steps, updates) == (12, [1, 2, 4, 5, 6, 7, 8, 10, 11, 12])
    blamed = ranks // 2  # the rank that reads sample 21
    line = f"phalanx: step 3: the loss of rank {blamed} is not finite; its update was dropped and its batch skipped"
    assert done.err.count(line) == 1
    assert done.err.count("its batch skipped") == 2
    assert "loss is nan" not in done.err  # it is reported once
    assert re.search(r"phalanx: 2 batches skipped, .* lost: goodput \d", done.err)
    skipped = [event for event in happened(done) if isinstance(event, events.BatchSkipped)]
    assert [event.step for event in skipped] == [3, 9]
    (measured,) = [event for event in happened(done) if isinstance(event, events.GoodputMeasured)]
    assert 0 < sum(event.seconds for event in skipped) <= measured.lost < measured.seconds


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
def test_rollback_and_a_dead_rank(tmp_path: Path) -> None:
    done = trained(tmp_path, "kill", options=("--on-nan", "rollback"))
    assert done.code == 0, done.err
    assert "no step lost" in done.err
    first, second = ends(tmp_path)
    assert first[1] == second[1] == [1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
    for name, value in first[2].items():
        if "running" not in name:  # a rank's own, and the new rank has those of the other
            assert value == second[2][name] == oracle("ddp", 2)[0][name], name


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("gradients",), "the gradients are not finite"),
        (("plain",), "the gradients are not finite"),
        (("mean", "plain"), "the loss is not finite"),
    ],
)
def test_losses_and_gradients_that_are_not_finite(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    done = trained(tmp_path, *words, options=("--on-nan", "rollback"))
    assert done.code == 0, done.err
    assert done.err.count(f"step 3: {what}; ") == 1
    assert [end[1] for end in ends(tmp_path)] == [[1, 2, 4, 5, 6, 7, 8, 10, 11, 12]] * 2


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
def test_stop_with_a_checkpoint_that_rollback_continues_from(tmp_path: Path) -> None:
    kept = ("--checkpoints", f"{tmp_path}/kept")
    done = trained(tmp_path, options=("--on-nan", "stop", "--max-restarts", "3", *kept))
    assert done.code == 65, done.err
    assert "stopped before the update of step 3: the loss of rank 1 is not finite\n  --on-nan stop\n" in done.err
    assert "a checkpoint of step 2 is on the disk" in done.err
    assert "not retrying: --on-nan has stopped the training" in done.err
    assert [path.name for path in (tmp_path / "kept").glob("step-*")] == ["step-000000000002"]
    again = trained(tmp_path, options=("--on-nan", "rollback", *kept))
    assert again.code == 0, again.err
    assert "resumed at step 2, " in again.out
    for end, state in zip(ends(tmp_path), oracle("ddp", 2), strict=True):
        assert end[1] == [1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
        assert {name: value for name, value in end[2].items() if "running" not in name} == {
            name: value for name, value in state.items() if "running" not in name
        }


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
def test_stop_that_the_script_catches(tmp_path: Path) -> None:
    done = trained(tmp_path, "catch", options=("--on-nan", "stop"))
    assert done.code == 65, done.err
    assert "stopped before the update of step 3" in done.err


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
def test_a_state_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    kept = ("--checkpoints", f"{tmp_path}/kept")
    done = trained(tmp_path, "poison", bad=[], options=("--on-nan", "rollback", *kept))
    assert done.code == 65, done.err
    assert "the parameters or buffers of the last committed step are not finite either" in done.err
    assert not list((tmp_path / "kept").glob("step-*"))


@pytest.mark.extended
@pytest.mark.usefixtures("_warm")
def test_report_changes_nothing(tmp_path: Path) -> None:
    done = trained(tmp_path)
    assert done.code == 0, done.err
    assert done.err.count("loss is nan since step 4; it was") == 1  # rank 0 has no sample of the batch before
    assert not [event for event in happened(done) if isinstance(event, events.BatchSkipped)]
