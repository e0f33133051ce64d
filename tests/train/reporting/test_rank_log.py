"""Values that other ranks log, and values that are logged again after a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.train.kept.kept_objects import TrainingProgress
from phalanx.train.reporting.metrics import Metrics
from phalanx.train.reporting.rank_log import LoggedRow, RankLog
from phalanx.train.reporting.reporter import RunReporter


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
