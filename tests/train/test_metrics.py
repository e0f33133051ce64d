"""metrics.jsonl: every committed step once, whatever happened before; and TensorBoard, where it is."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train import metrics
from phalanx.train.metrics import FLUSH_EVERY, Metrics, cut, encode

BOARD = importlib.util.find_spec("tensorboard") is not None


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder: Path, numbers: range, resumed_at: int = 0) -> None:
    with Metrics(str(folder), resumed_at=resumed_at, tensorboard=False) as file:
        for step in numbers:
            file.write(step, step // 10, {"loss": 1 / step})


def test_a_step_is_a_line(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == ["step", "epoch", "time", "loss"]
    assert (first["step"], first["epoch"], first["loss"]) == (1, 0, 1.0)
    assert second["time"] >= first["time"] > 1.7e9


def test_tensors_and_numbers(tmp_path: Path) -> None:
    import torch

    loss = torch.tensor(0.25, requires_grad=True)
    running = torch.tensor([2.0])
    with Metrics(str(tmp_path), tensorboard=False) as file:
        file.write(1, 0, {"loss": loss, "lr": 1e-3, "count": 3, "running": running})
        running += 1  # what was handed over is what counts
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (found["loss"], found["lr"], found["count"], found["running"]) == (0.25, 0.001, 3, 2.0)


def test_what_is_not_finite_is_still_json() -> None:
    found = json.loads(encode(1, 0, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf}), parse_constant=pytest.fail)
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


def test_a_training_that_begins_anew_keeps_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(1, 3))
    assert steps(tmp_path) == [1, 2]
    assert len((tmp_path / "metrics.previous.jsonl").read_text().splitlines()) == 5


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
    """Against the plain way, with blocks so small that lines lie across them."""
    lines = [encode(number, 0, 0.0, {"x": number / 3}).encode() for number in numbers]
    kept = b"".join(line for number, line in zip(numbers, lines, strict=True) if number <= step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_BLOCK", block)
        assert cut(io.BytesIO(b"".join(lines) + rest), step) == len(kept)


def test_others_can_read_it_while_it_grows(tmp_path: Path) -> None:
    now = [0.0]
    with Metrics(str(tmp_path), tensorboard=False, clock=lambda: now[0]) as file:
        file.write(1, 0, {"loss": 1.0})
        assert steps(tmp_path) == []
        now[0] += FLUSH_EVERY
        file.write(2, 0, {"loss": 1.0})
        assert steps(tmp_path) == [1, 2]


def test_closing_twice(tmp_path: Path) -> None:
    file = Metrics(str(tmp_path), tensorboard=False)
    file.close()
    file.close()


@pytest.mark.skipif(BOARD, reason="tensorboard is installed")
@pytest.mark.parametrize(("asked", "note"), [(None, ""), (False, ""), (True, "pip install 'phalanx[tensorboard]'")])
def test_without_tensorboard(tmp_path: Path, asked: bool | None, note: str) -> None:
    with Metrics(str(tmp_path), tensorboard=asked) as file:
        file.write(1, 0, {"loss": 1.0})
    assert note in file.note
    assert bool(note) == bool(file.note)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not BOARD, reason="tensorboard is not installed")
def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, resumed_at in ((1, 8, 0), (5, 10, 4)):
        with Metrics(str(tmp_path), resumed_at=resumed_at) as file:
            for step in range(first, last):
                file.write(step, 0, {"loss": 1 / step})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 10))
    assert steps(tmp_path) == list(range(1, 10))
