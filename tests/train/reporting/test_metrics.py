"""metrics.jsonl: every committed step once, whatever happened before; TensorBoard's own reader returns the same."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import UsageError
from phalanx.train.reporting import earlier_lines, metrics
from phalanx.train.reporting.earlier_lines import cut
from phalanx.train.reporting.metrics import FLUSH_EVERY, LOG_FLUSH_EVERY, MOST, Metrics, encode, held, read
from phalanx.train.reporting.trackers import FunctionTracker
from tests.kit.cli import until


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder: Path, numbers: range, resumed_at: int = 0) -> None:
    with Metrics(str(folder), resumed_at=resumed_at, tensorboard=False) as file:
        for step in numbers:
            file.write(step, step // 10, held({"loss": 1 / step}))


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the scalars, as read by TensorBoard."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance={reader.SCALARS: 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_step_is_a_line(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == ["step", "epoch", "time", "loss"]
    assert (first["step"], first["epoch"], first["loss"]) == (1, 0, 1.0)
    assert second["time"] >= first["time"] > 1.7e9


def test_tensors_and_numbers(tmp_path: Path) -> None:
    loss = torch.tensor(0.25, requires_grad=True)
    running = torch.tensor([2.0])
    with Metrics(str(tmp_path), tensorboard=False) as file:
        file.write(1, 0, held({"loss": loss, "lr": 1e-3, "count": 3, "running": running, 'a "b"\n': 1.5}))
        running += 1  # the value at the time of the call counts
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (found["loss"], found["lr"], found["count"], found["running"]) == (0.25, 0.001, 3, 2.0)
    assert found['a "b"\n'] == 1.5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": torch.ones(3)}, "the metric loss is a tensor of shape [3], not one number"),
        ({"phase": "warm"}, "the metric phase is 'warm', not one number"),
        ({"far": torch.ones(2, device="meta")}, "the metric far is a tensor of shape [2]"),
        ({"step": 3}, 'a metric cannot be named "step"'),
    ],
)
def test_invalid_metrics_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        held(values)
    assert words in str(caught.value)


def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU replace those on a GPU, which `held` leaves there."""
    asked = []
    plain = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        asked.append(tensor.shape)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    rows = [{"loss": torch.tensor(float(i)), "half": torch.tensor([i / 4], dtype=torch.bfloat16)} for i in range(9)]
    assert read(rows) == [{"loss": float(i), "half": i / 4} for i in range(9)]
    assert len(asked) == 2  # one for each kind


def test_a_tensor_elsewhere_is_copied_and_not_read() -> None:
    loss = torch.ones((), device="meta", requires_grad=True)  # reading it would raise
    found = held({"loss": loss})["loss"]
    assert (found is not loss, found.device.type, found.requires_grad) == (True, "meta", False)


def test_values_that_are_not_finite_are_valid_json() -> None:
    found = json.loads(encode(1, 0, 0.0, 0, {"a": math.nan, "b": math.inf, "c": -math.inf}), parse_constant=pytest.fail)
    assert math.isnan(float(found["a"]))
    assert (float(found["b"]), float(found["c"])) == (math.inf, -math.inf)


def test_a_resumed_run_writes_every_step_once(tmp_path: Path) -> None:
    write(tmp_path, range(1, 26))
    write(tmp_path, range(21, 31), resumed_at=20)
    assert steps(tmp_path) == list(range(1, 31))


def test_a_killed_run_may_have_left_half_a_line(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "epo')
    write(tmp_path, range(6, 8), resumed_at=5)
    assert steps(tmp_path) == list(range(1, 8))


def test_a_training_that_starts_again_keeps_earlier_metrics(tmp_path: Path) -> None:
    for last in (6, 4, 3):
        write(tmp_path, range(1, last))
    assert steps(tmp_path) == [1, 2]
    assert [len((tmp_path / f"metrics.{number}.jsonl").read_text().splitlines()) for number in (1, 2)] == [5, 3]


def test_nothing_was_there_to_resume(tmp_path: Path) -> None:
    write(tmp_path, range(8, 10), resumed_at=7)
    assert steps(tmp_path) == [8, 9]


@given(
    st.lists(st.integers(1, 300), max_size=40, unique=True).map(sorted),
    st.integers(0, 301),
    st.integers(1, 300),
    st.sampled_from([b"", b"{", b'{"step": 1', b'{"step": 400}\nhalf']),
)
def test_cut(numbers: list[int], step: int, block: int, rest: bytes) -> None:
    """Compared with a simple implementation, with blocks so small that lines cross them."""
    lines = [encode(number, 0, 0.0, 0, {"x": number / 3}).encode() for number in numbers]
    kept = b"".join(line for number, line in zip(numbers, lines, strict=True) if number <= step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier_lines, "_BLOCK", block)
        assert cut(io.BytesIO(b"".join(lines) + rest), step) == len(kept)


def test_numbers_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logged values of a killed process are in the file, and others can read it while it grows."""
    monkeypatch.setattr(metrics, "PAUSE", 60.0)
    with Metrics(str(tmp_path), clock=lambda: 0.0) as file:
        for step in range(1, 51):
            file.write(step, 0, {"loss": 1.0})
            assert steps(tmp_path)[-1] == step
        assert scalars(tmp_path, "loss")[-1] == (50, 1.0)
        file.log(50, 0, 1.0, {"accuracy": 0.5})  # that was very often
        assert len(steps(tmp_path)) == 50
    assert len(steps(tmp_path)) == 51


def test_lines_of_fast_steps_are_written_in_a_pause(tmp_path: Path) -> None:
    """The training is killed in a long evaluation after fast steps. Trackers are called by the training only."""
    tracked: list[tuple[int, int]] = []
    tracker = FunctionTracker(lambda step, _: tracked.append((step, threading.get_ident())))
    with Metrics(str(tmp_path), tensorboard=False, trackers=[tracker], clock=lambda: 0.0) as file:
        for last in (70, 80):
            for step in range(len(steps(tmp_path)) + 1, last + 1):
                file.write(step, 0, {"loss": 1.0})
            until(lambda last=last: steps(tmp_path) == list(range(1, last + 1)), 20)
            assert len(tracked) == 50
    assert steps(tmp_path) == list(range(1, 81))
    assert tracked == [(step, threading.get_ident()) for step in range(1, 81)]


def test_a_full_disk_in_a_pause_is_reported_with_the_next_line(tmp_path: Path) -> None:
    said: list[str] = []
    with Metrics(str(tmp_path), tensorboard=False, say=said.append, clock=lambda: 0.0) as file:
        for step in range(1, 52):
            file.write(step, 0, {"loss": 1.0})
        until(lambda: len(steps(tmp_path)) == 51, 20)
        assert file._file is not None
        file._file.close()
        file._file = open("/dev/full", "ab")  # noqa: SIM115
        file.write(52, 0, {"loss": 1.0})
        until(lambda: file._waiting.in_file == 2, 20)
        assert said == []
        file.flush()
    assert said == ["metrics are no longer written: [Errno 28] No space left on device"]


def test_what_is_on_a_gpu_is_read_before_a_pause(tmp_path: Path) -> None:
    now = [0.0]
    with Metrics(str(tmp_path), tensorboard=False, clock=lambda: now[0]) as file:
        file.write(1, 0, {"loss": torch.tensor(0.5)})
        file.settle()
        assert steps(tmp_path) == []  # not often
        now[0] += LOG_FLUSH_EVERY
        file.settle()
        assert steps(tmp_path) == [1]


def test_what_is_on_a_gpu_waits_and_lines_after_it_do(tmp_path: Path) -> None:
    now, there = [0.0], torch.tensor(0.5)  # `held` returns a tensor only if it is on a GPU
    with Metrics(str(tmp_path), tensorboard=False, clock=lambda: now[0]) as file:
        file.write(1, 0, {"loss": there})
        file.log(1, 0, 1.0, {"accuracy": 0.5})
        assert steps(tmp_path) == []
        now[0] += LOG_FLUSH_EVERY
        file.write(2, 0, {"loss": there})
        assert steps(tmp_path) == []
        file.log(2, 0, 1.0, {"accuracy": 0.5})  # not often
        assert steps(tmp_path) == [1, 1, 2, 2]
        file.write(3, 0, {"loss": there})
        now[0] += FLUSH_EVERY
        assert steps(tmp_path) == [1, 1, 2, 2]
        file.write(4, 0, {"loss": there})
        assert steps(tmp_path) == [1, 1, 2, 2, 3, 4]


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    with Metrics(str(tmp_path), tensorboard=False, clock=lambda: 0.0) as file:
        for step in range(1, MOST + 2):
            file.write(step, 0, {"loss": torch.tensor(1.0)})
        assert len(steps(tmp_path)) == MOST


def test_closing_twice(tmp_path: Path) -> None:
    file = Metrics(str(tmp_path), tensorboard=False)
    file.close()
    file.close()


def test_a_full_disk_ends_the_metrics_and_not_the_training(tmp_path: Path) -> None:
    messages: list[str] = []
    with Metrics(str(tmp_path), tensorboard=False, say=messages.append) as file:
        assert file._file is not None
        file._file.close()
        file._file = open("/dev/full", "ab")  # noqa: SIM115
        for step in (1, 2):
            file.write(step, 0, {"loss": 1.0})
            file.flush()
    assert messages == ["metrics are no longer written: [Errno 28] No space left on device"]


@pytest.mark.parametrize("resumed_at", [0, 5])
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
def test_only_a_regular_file_of_the_folder_is_written(kind: str, resumed_at: int, tmp_path: Path) -> None:
    """A folder of checkpoints that someone else has made may have a link to a file outside of it."""
    folder, outside = tmp_path / "checkpoints", tmp_path / "outside"
    folder.mkdir()
    if kind == "fifo":
        os.mkfifo(folder / "metrics.jsonl")
    else:
        (folder / "metrics.jsonl").symlink_to(outside)
    if kind == "link" and resumed_at:
        outside.write_text("precious\n")
    elif kind == "link":
        outside.touch()  # one with contents is renamed: the link, not what it leads to
    messages: list[str] = []
    with Metrics(str(folder), resumed_at=resumed_at, tensorboard=False, say=messages.append) as file:
        file.write(6, 0, {"loss": 1.0})
        assert not file.has_logged(5, {"accuracy": 0.5})
    (line,) = messages
    named = "a FIFO" if kind == "fifo" else "a link"
    assert line.startswith("metrics are no longer written: ")
    assert f"checkpoints/metrics.jsonl: is {named}, not a regular file" in line
    assert outside.exists() is (kind == "link")
    assert kind != "link" or outside.read_text() == ("precious\n" if resumed_at else "")


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    messages: list[str] = []
    with Metrics(str(tmp_path / "file" / "folder"), say=messages.append) as file:
        file.write(1, 0, {"loss": 1.0})
    assert len(messages) == 1
    assert "Not a directory" in messages[0]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    for first, last, resumed_at in ((1, 8, 0), (5, 300, 4)):
        with Metrics(str(tmp_path), resumed_at=resumed_at) as file:
            for step in range(first, last):
                file.write(step, 0, held({"loss": 1 / step, "größe/a": step * 1e9}))
    assert scalars(tmp_path, "loss") == [(step, pytest.approx(1 / step, rel=1e-6)) for step in range(1, 300)]
    assert scalars(tmp_path, "größe/a")[-1] == (299, pytest.approx(299e9))
    assert steps(tmp_path) == list(range(1, 300))


def test_tensorboard_drops_steps_of_an_earlier_training(tmp_path: Path) -> None:
    for last in (8, 3):
        with Metrics(str(tmp_path)) as file:
            for step in range(1, last):
                file.write(step, 0, {"loss": float(last)})
    assert scalars(tmp_path, "loss") == [(1, 3.0), (2, 3.0)]


def test_tensorboard_after_a_kill(tmp_path: Path) -> None:
    """Half a record at the end of a file is where a reader stops, and continues with the next file."""
    with Metrics(str(tmp_path)) as file:
        for step in (1, 2, 3):
            file.write(step, 0, {"loss": 1.0})
    (events,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(events, events.stat().st_size - 5)
    with Metrics(str(tmp_path), resumed_at=2) as file:
        file.write(3, 0, {"loss": 2.0})
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_has_words_for_what_is_not_finite(tmp_path: Path) -> None:
    with Metrics(str(tmp_path)) as file:
        file.write(1, 0, {"a": math.nan, "b": -math.inf, "c": 1e300})
    assert math.isnan(scalars(tmp_path, "a")[0][1])
    assert [scalars(tmp_path, name)[0][1] for name in "bc"] == [-math.inf, math.inf]


def test_a_step_costs_little(tmp_path: Path) -> None:
    """Including later writes, about four times the cost of formatting the line. The best rounds count, because machines
    are busy.
    """
    values = {"loss": torch.tensor(0.5), "lr": 0.1}

    def cpu(write: Callable[[int], object]) -> float:
        begin = time.thread_time()
        for step in range(MOST):
            write(step)
        return time.thread_time() - begin

    def line(step: int) -> str:
        return json.dumps({"step": step, "epoch": 0, "loss": values["loss"].item(), "lr": 0.1})

    with Metrics(str(tmp_path), clock=lambda: 0.0) as file:
        written = min(cpu(lambda step: file.write(step, 0, held(values))) for _ in range(5))
    assert written < 10 * min(cpu(line) for _ in range(5))


def test_lines_of_other_programs_do_not_hide_what_rank_0_had_logged(tmp_path: Path) -> None:
    rows = ['{"step": 1, "accuracy": null}', '{"step": 2, "accuracy": 0.5}', '{"step": 3, "accur']
    (tmp_path / metrics.NAME).write_text("\n".join(rows) + "\n")
    writer = Metrics(str(tmp_path), resumed_at=2, tensorboard=False)
    assert writer.has_logged(2, {"accuracy": 0.5})
    assert not writer.has_logged(1, {"accuracy": 0.5})
    writer.close("done")
