"""Experiment trackers: `phalanx.main(train, log_to=…)`."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import UsageError
from phalanx.train.reporting import trackers
from phalanx.train.reporting.metrics import Ending, Metrics
from phalanx.worker import given_hyperparameters


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


def test_ids_are_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text('{"wandb": "x"}')
    (tmp_path / "ids").symlink_to(tmp_path / "outside")
    assert trackers._ids(str(tmp_path / "outside")) == {"wandb": "x"}
    assert trackers._ids(str(tmp_path / "ids")) == {}


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    seen: list[int] = []

    def broken(step: int, values: Any) -> None:
        seen.append(step)
        raise ConnectionError("no network")

    assert send(tmp_path, broken, (1, 2, 3)) == ["metrics are not sent to broken: ConnectionError: no network"]
    assert seen == [1]
    (message,) = send(tmp_path, "wandb", (1,))
    assert message.startswith("metrics are not sent to wandb: ModuleNotFoundError")
    assert message.endswith("pip install wandb")


def test_a_tracker_that_is_not_known(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        phalanx.main(lambda run: run.rank, log_to="tensorbord")
    assert "log_to='tensorbord' is not known" in capfd.readouterr().err
    expected = r"log_to='tensorbord' is not known\n.*wandb, mlflow, or a function"
    with phalanx.init(device="cpu") as group, pytest.raises(UsageError, match=expected):
        phalanx.Run(group, log_to="tensorbord")
