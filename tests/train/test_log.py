"""`run.log`: values of other ranks, repeated values, and experiment trackers."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import UsageError
from phalanx.train.kept.kept_objects import TrainingProgress
from phalanx.train.reporting import trackers
from phalanx.train.reporting.metrics import Ending, Metrics
from phalanx.train.reporting.rank_log import LoggedRow, RankLog
from phalanx.train.reporting.reporter import RunReporter
from phalanx.worker import given_hyperparameters


class Store:
    """The store of a run, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.numbers: dict[str, int] = {}
        self.gone = False

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str, timeout: float | None = None) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int = 1) -> int:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        self.numbers[key] = self.numbers.get(key, 0) + amount
        return self.numbers[key]

    def check(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def row(step: int, rank: int = 1, **values: float) -> LoggedRow:
    return LoggedRow(step, 0, 1.0, values, rank)


def test_rows_reach_rank_0_once() -> None:
    now = [0.0]
    store = Store()
    first, second = RankLog(store, 0, 2), RankLog(store, 1, 2, clock=lambda: now[0])
    for step in range(1, 21):
        second.add(row(step, a=0.5))
    assert first.take() == [row(step, a=0.5) for step in range(1, 21)]  # each was posted at once
    second.add(row(21, a=0.6))  # too many at once
    assert first.take() == []
    now[0] += 0.02
    second.post()
    second.add(row(22, a=0.7))
    second.end()
    assert first.take_last() == [row(21, a=0.6), row(22, a=0.7)]
    assert store.values == {}


def test_rank_0_of_the_next_generation_takes_what_dead_ranks_have_posted(tmp_path: Path) -> None:
    """Each row once. Rows of steps that the training repeats are omitted."""
    store = Store()
    before, other = RankLog(store, 0, 2), RankLog(store, 1, 2)
    other.add(row(1, a=0.5))
    assert before.take() == [row(1, a=0.5)]
    other.add(row(2, a=0.6))
    other.add(row(2, a=0.7))
    other.add(row(3, a=0.8))
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "epoch": 0, "time": 1.0, "loss": 0.1}\n')

    counter = TrainingProgress(steps=3, start=2)
    later = RankLog(store, 0, 2, generation=1, group_store=Store())
    reporter = RunReporter(counter, None, folder=lambda: str(tmp_path), rank_log=later)
    again = RankLog(store, 1, 2, generation=1, group_store=later._group_store)
    again.add(LoggedRow(2, 0, 2.0, {"a": 0.6}, 1, 1))  # the script repeats the end of an epoch
    again.add(LoggedRow(2, 0, 2.0, {"b": 0.9}, 1, 1))
    reporter.begin(None, {"loss": 0.2})
    again.end()
    reporter.finish()
    reporter.close()
    found = lines(tmp_path)
    assert sorted(found, key=str) == sorted(
        [
            {"step": 2, "loss": 0.1},
            {"step": 3, "loss": 0.2},
            {"step": 2, "rank": 1, "a": 0.6},
            {"step": 2, "rank": 1, "a": 0.7},
            {"step": 2, "rank": 1, "b": 0.9},
        ],
        key=str,
    )


def test_what_all_ranks_had_logged_before_the_group_formed_again_is_there_once(tmp_path: Path) -> None:
    """Rank 0 has died, or has not read yet what another rank has posted."""
    store = Store()
    other = RankLog(store, 1, 2)
    other.add(row(1, accuracy=0.5, lost=float("nan")))
    other.add(row(2, accuracy=0.6))
    logged = [{"step": 1, "accuracy": 0.5, "lost": "nan"}, {"step": 2, "loss": 0.1}, {"step": 2, "accuracy": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in logged))

    counter = TrainingProgress(steps=3, start=2)
    later = RankLog(store, 0, 2, generation=1, group_store=Store())
    reporter = RunReporter(counter, None, folder=lambda: str(tmp_path), rank_log=later)
    reporter.begin(None, {"loss": 0.2})
    reporter.close()
    assert lines(tmp_path) == [*logged, {"step": 3, "loss": 0.2}, {"step": 2, "rank": 1, "accuracy": 0.6}]


def test_what_all_ranks_log_before_the_state_is_restored_is_there_once(tmp_path: Path) -> None:
    """The step is not known at that time."""
    store, counters = Store(), [TrainingProgress(), TrainingProgress()]
    reporters = [
        RunReporter(counter, None, folder=lambda: str(tmp_path), rank_log=RankLog(store, rank, 2), rank=rank)
        for rank, counter in enumerate(counters)
    ]
    for reporter, counter in zip(reporters, counters, strict=True):
        reporter.log({"accuracy": 0.5})
        counter.steps, counter.start = 7, 7  # restored
        reporter.log({"lr": 0.1})
        counter.steps = 8
    first, second = reporters
    second.post()
    second.log({"heat": 71.0})
    second.finish()
    first.begin(None, {"loss": 0.2})
    counters[0].steps = 9
    first.finish()
    for reporter in reporters:
        reporter.close()
    assert lines(tmp_path) == [
        {"step": 7, "accuracy": 0.5},
        {"step": 7, "lr": 0.1},
        {"step": 8, "loss": 0.2},
        {"step": 8, "rank": 1, "heat": 71.0},
    ]


def test_a_late_or_invalid_message_delays_no_rank() -> None:
    store = Store()
    first, second = RankLog(store, 0, 3), RankLog(store, 1, 3)
    store.add("log/posted")  # of a rank that was killed before it could set the value, or will do so
    second.add(row(1, a=0.5))
    assert first.take() == [row(1, a=0.5)]
    store.set("log/1", b"no rows")
    assert first.take() == []
    assert store.values == {}


def test_without_a_store_what_is_logged_is_dropped() -> None:
    store = Store()
    store.gone = True
    first, second = RankLog(store, 0, 2), RankLog(store, 1, 2)
    second.add(row(1, a=0.5))
    second.end()
    assert first.take_last() == []
    store.gone = False  # another store, to which this group is not connected: it is not queried again
    second.add(row(2, a=0.5))
    second.post(now=True)
    assert first.take() == []
    assert store.numbers == {}


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name not in ("time", "epoch")} for line in found]


def test_ranks_that_log_the_same_are_one(tmp_path: Path) -> None:
    """A value that differs between ranks is recorded with its rank, in any order."""
    store, counter = Store(), TrainingProgress()
    reporter = RunReporter(counter, None, folder=lambda: str(tmp_path), rank_log=RankLog(store, 0, 2))
    other = RankLog(store, 1, 2)
    counter.steps = 1
    reporter.begin(None, {})
    other.add(row(1, accuracy=0.5, lost=float("nan")))
    reporter._due = 0.0
    reporter.committed(1, {})  # it is at the same step still
    reporter.log({"accuracy": 0.5, "lost": float("nan")})
    other.add(row(1, accuracy=0.6))
    other.end()
    counter.steps = 2
    reporter.finish()
    reporter.close()
    assert lines(tmp_path) == [
        {"step": 1, "accuracy": 0.5, "lost": "nan"},
        {"step": 1, "rank": 1, "accuracy": 0.6},
    ]


def test_what_is_logged_again_after_a_resume_is_there_once(tmp_path: Path) -> None:
    """Lines of other ranks are not in order, and are kept if they belong to a step that counts."""
    with Metrics(str(tmp_path), tensorboard=False) as file:
        for step in (1, 2, 3):
            file.write(step, 0, {"loss": 1.0})
            file.log(step, 0, 1.0, {"accuracy": 0.5})
        for step in (1, 2, 3):
            file.log(step, 0, 1.0, {"heat": 71.0}, rank=3)
    with Metrics(str(tmp_path), tensorboard=False, resumed_at=2) as file:
        file.log(2, 0, 1.0, {"accuracy": 0.5})
        file.log(2, 0, 1.0, {"accuracy": 0.6})  # once more than before
        file.write(3, 0, {"loss": 1.0})
    found = [(line["step"], *list(line)[1:]) for line in lines(tmp_path)]
    assert found == [
        (1, "loss"),
        (1, "accuracy"),
        (2, "loss"),
        (2, "accuracy"),
        (1, "rank", "heat"),
        (2, "rank", "heat"),
        (2, "accuracy"),
        (3, "loss"),
    ]


# -- one process


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with phalanx.Run(phalanx.init(device="cpu")) as run:
        run.group.folder = str(tmp_path)
        yield run


def test_at_any_time(run: phalanx.Run, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run.log(begun=1)
    for _ in range(2):
        run.backward(model(torch.ones(1, 1)).mean())
        run.step(opt, loss=torch.tensor(0.5))
        run.log({"val/accuracy": 0.25}, lr=0.1)
    run.log()
    run.group.close()
    assert lines(tmp_path) == [
        {"step": 0, "begun": 1.0},
        {"step": 1, "loss": 0.5},
        {"step": 1, "val/accuracy": 0.25, "lr": 0.1},
        {"step": 2, "loss": 0.5},
        {"step": 2, "val/accuracy": 0.25, "lr": 0.1},
    ]


def test_without_a_step_too(run: phalanx.Run, tmp_path: Path) -> None:
    run.log(accuracy=0.5)
    run.group.close()
    assert lines(tmp_path) == [{"step": 0, "accuracy": 0.5}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("text", r"a str, expected metrics by name\n.*run.print"),
        ({1: 2}, "expected metrics by name"),
        ({"name": "text"}, "the metric name is 'text', not one number"),
        ({"step": 1}, 'cannot be named "step"'),
        ({"rank": 1}, 'cannot be named "rank"'),
    ],
)
def test_invalid_metrics_are_refused(run: phalanx.Run, values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run.log(values)


# -- trackers


class FakeWandb(types.ModuleType):
    """A fake of Weights & Biases, which needs its own server process: the few functions that phalanx calls, as version
    0.31 behaves offline. Steps must not decrease; `log` needs a run."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: Any = None
        self.calls: list[Any] = []

    def init(
        self,
        *,
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        resume: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> Any:
        assert self.run is None
        self.calls.append(("init", id, name, config))
        self.run = types.SimpleNamespace(id=id or "abc123")
        return self.run

    def log(self, values: dict[str, float], step: int) -> None:
        assert self.run is not None
        self.calls.append((step, values))

    def finish(self, exit_code: int = 0) -> None:
        self.calls.append(("finish", exit_code))
        self.run = None


class FakeMlflow(types.ModuleType):
    """A fake of MLflow, which installs a database with it, in the same way: as version 3.17 behaves.

    It refuses names with other characters, and more than one value of a hyperparameter."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.active: Any = None
        self.calls: list[Any] = []
        self.entities = types.SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (step, key, value), Param=lambda key, value: (key, value)
        )

    def MlflowClient(self) -> FakeMlflow:
        return self

    def active_run(self) -> Any:
        return self.active

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        assert self.active is None
        self.calls.append(("start", run_id, run_name))
        self.active = types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "def456"))
        return self.active

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        assert self.active.info.run_id == run_id
        assert all(re.fullmatch(r"[/\w.\- :]+", key) for _, key, _ in metrics)
        self.calls.append([*params, *metrics])

    def end_run(self, status: str = "FINISHED") -> None:
        assert threading.current_thread() is threading.main_thread()  # in others there is no active run
        self.calls.append(("end", status))
        self.active = None

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(("terminated", run_id, status))


def send(
    folder: Path,
    log_to: Any,
    steps: tuple[int, ...],
    resumed_at: int = 0,
    *,
    ending: Ending = "done",
    name: str = "loss",
) -> list[str]:
    messages: list[str] = []
    members = trackers.trackers(log_to)
    file = Metrics(str(folder), resumed_at=resumed_at, tensorboard=False, trackers=members, say=messages.append)
    for step in steps:
        file.write(step, 0, {name: 0.5})
    file.log(steps[0], 0, 1.0, {"heat": 71.0}, rank=3)
    file.close(ending)
    return messages


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeWandb, FakeMlflow]:
    wandb, mlflow = FakeWandb(), FakeMlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(trackers, "_started", set())
    monkeypatch.setattr(trackers, "_used", {})
    monkeypatch.setattr(given_hyperparameters, "_given", {})
    return wandb, mlflow


def test_wandb_and_mlflow(fakes: tuple[FakeWandb, FakeMlflow], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb, mlflow = fakes
    monkeypatch.setenv("PHALANX_RUN", "mine")
    given_hyperparameters.record({"lr": 0.1}, {})
    assert send(tmp_path, ["wandb", "mlflow"], (1, 2)) == []
    assert wandb.calls == [
        ("init", None, "mine", {"lr": 0.1}),
        (1, {"loss": 0.5}),
        (2, {"loss": 0.5}),
        (2, {"heat/rank 3": 71.0}),  # its steps never decrease
        ("finish", 0),
    ]
    assert mlflow.calls == [
        ("start", None, "mine"),
        [("lr", "0.1")],
        [(1, "loss", 0.5), (2, "loss", 0.5), (1, "heat/rank 3", 71.0)],  # one request for all of them
        ("end", "FINISHED"),
    ]
    assert (tmp_path / trackers.NAME).stat().st_mode & 0o777 == 0o600
    # Resumed, the same runs are continued, with the hyperparameters that MLflow has.
    wandb.calls.clear()
    mlflow.calls.clear()
    send(tmp_path, ["wandb", "mlflow"], (3,), resumed_at=2)
    assert (wandb.calls[0], mlflow.calls[0]) == (("init", "abc123", "mine", {"lr": 0.1}), ("start", "def456", None))
    assert len(mlflow.calls) == 3
    # What the script has started is used, and not ended.
    wandb.init(id="own")
    wandb.calls.clear()
    send(tmp_path, "wandb", (1,))
    assert wandb.calls == [(1, {"loss": 0.5}), (1, {"heat/rank 3": 71.0})]
    assert json.loads((tmp_path / trackers.NAME).read_text()) == {"wandb": "own"}
    # The folder may be one that someone else has made.
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / trackers.NAME).unlink()
    (tmp_path / trackers.NAME).symlink_to(outside)
    (line,) = send(tmp_path, "wandb", (2,), resumed_at=1)
    assert f"{trackers.NAME}: is a link, not a regular file" in line
    assert outside.read_text() == "precious"


def test_a_run_of_a_tracker_stays_open_while_the_group_forms_again(
    fakes: tuple[FakeWandb, FakeMlflow], tmp_path: Path
) -> None:
    """To end and resume it takes seconds, and offline a second folder."""
    wandb, mlflow = fakes
    send(tmp_path, ["wandb", "mlflow"], (1, 2), ending="left")
    send(tmp_path, ["wandb", "mlflow"], (3,), resumed_at=2)
    first = [[call[0] for call in calls if isinstance(call[0], str)] for calls in (wandb.calls, mlflow.calls)]
    assert first == [["init", "finish"], ["start", "end"]]
    assert [call[0] for call in wandb.calls if isinstance(call[0], int)] == [1, 2, 2, 3, 3]


@pytest.mark.parametrize(("ending", "code", "state"), [("failed", 1, "FAILED"), ("stopped", 255, "KILLED")])
def test_a_run_that_failed_or_was_stopped_is_one_in_the_tracker(
    fakes: tuple[FakeWandb, FakeMlflow], tmp_path: Path, ending: Ending, code: int, state: str
) -> None:
    wandb, mlflow = fakes
    send(tmp_path, ["wandb", "mlflow"], (1,), ending=ending)
    assert (wandb.calls[-1], mlflow.calls[-1]) == (("finish", code), ("end", state))
    trackers.close_all("failed")  # there is nothing left
    assert (wandb.calls[-1], mlflow.calls[-1]) == (("finish", code), ("end", state))


def test_trackers_of_a_process_that_is_about_to_be_killed(
    fakes: tuple[FakeWandb, FakeMlflow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the script is ended, too: the script cannot do it. What the main thread sends meanwhile may fail."""
    monkeypatch.setattr(trackers, "_ended", threading.Event())
    wandb, mlflow = fakes
    wandb.init(id="own")
    messages: list[str] = []
    file = Metrics(str(tmp_path), trackers=trackers.trackers(["wandb", "mlflow"]), say=messages.append)
    file.write(1, 0, {"loss": 0.5})
    trackers.end_all("stopped", 5.0)
    assert wandb.calls[-1] == ("finish", 255)
    assert mlflow.calls[-2:] == [[(1, "loss", 0.5)], ("terminated", "def456", "KILLED")]
    file.write(2, 0, {"loss": 0.5})
    file.close()
    assert messages == []


def test_a_run_that_is_left_is_ended_without_a_group(fakes: tuple[FakeWandb, FakeMlflow], tmp_path: Path) -> None:
    wandb, mlflow = fakes
    send(tmp_path, ["wandb", "mlflow"], (1,), ending="left")
    trackers.close_all("stopped")
    assert (wandb.calls[-1], mlflow.calls[-1]) == (("finish", 255), ("end", "KILLED"))


def test_a_name_that_mlflow_refuses(fakes: tuple[FakeWandb, FakeMlflow], tmp_path: Path) -> None:
    assert send(tmp_path, "mlflow", (1,), name="acc@5") == []
    assert (1, "acc_5", 0.5) in fakes[1].calls[1]


@pytest.mark.parametrize("text", ["", "[]", '{"wandb": 3}', '{"wandb": "../x y"}', '{"other": "x"}'])
def test_ids_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "ids").write_text(text)
    assert trackers._ids(str(tmp_path / "ids")) == {}


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    seen: list[int] = []

    def broken(step: int, values: Any) -> None:
        seen.append(step)
        raise ConnectionError("no network")

    assert send(tmp_path, broken, (1, 2, 3)) == ["metrics are not sent to broken: ConnectionError: no network"]
    assert seen == [1]
    (messages,) = send(tmp_path, "wandb", (1,))
    assert messages.startswith("metrics are not sent to wandb: ModuleNotFoundError")
    assert messages.endswith("pip install wandb")


def test_a_tracker_that_is_not_known(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        phalanx.main(lambda run: run.rank, log_to="tensorbord")
    assert "log_to='tensorbord' is not known" in capfd.readouterr().err
    expected = r"log_to='tensorbord' is not known\n.*wandb, mlflow, or a function"
    with phalanx.init(device="cpu") as group, pytest.raises(UsageError, match=expected):
        phalanx.Run(group, log_to="tensorbord")
