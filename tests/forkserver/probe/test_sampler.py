"""What one sample of a thread shows: its phase, movement, batches and steps."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from phalanx.forkserver.board import status_slot
from phalanx.forkserver.probe import movement, phases, sampler
from phalanx.forkserver.probe.steps import StepCounter


@pytest.mark.parametrize(
    ("path", "name", "phase"),
    [
        ("_dynamo/convert_frame.py", "_compile", "compile"),
        ("_dynamo/eval_frame.py", "compile_wrapper", ""),
        ("_inductor/compile_fx.py", "compile_fx", "compile"),
        ("_inductor/runtime/triton_heuristics.py", "run", ""),
        ("_inductor/runtime/triton_heuristics.py", "autotune_to_one_config", "compile"),
        ("distributed/distributed_c10d.py", "get_rank", ""),
        ("distributed/distributed_c10d.py", "all_gather_object", "collective"),
        ("distributed/distributed_c10d.py", "_store_based_barrier", "join"),
        ("distributed/checkpoint/state_dict_saver.py", "save", "checkpoint"),
        ("amp/grad_scaler.py", "step", "optimizer"),
        ("utils/checkpoint.py", "checkpoint", ""),
    ],
)
def test_the_phase_of_a_function_of_torch(path: str, name: str, phase: str) -> None:
    assert phases._of_torch(path, name) == phase


def test_a_thread_moves_when_its_place_or_a_counter_changes() -> None:
    moving = movement.Movement()
    assert moving.still == 0.0
    assert moving.update((1, 2, 3), (0,), 100)
    assert moving.stays((1, 2, 3))
    assert not moving.update((1, 2, 3), (0,), 200)
    assert moving.update((1, 2, 3), (1,), 300)  # a step later
    assert moving.update((1, 4, 3), (1,), 400)
    assert (moving.moves, moving.moved, moving.places) == (3, 400, 2)


def test_batches_of_a_loader_are_counted() -> None:
    text = "class Loader:\n    _num_yielded = 7\n    def __next__(self):\n        return look()\n"
    names: dict[str, Any] = {"look": lambda: sampler._batches(sys._getframe())}
    exec(compile(text, "/x/torch/utils/data/dataloader.py", "exec"), names)
    assert next(names["Loader"]()) == 7
    assert sampler._batches(sys._getframe()) == 0


@pytest.mark.parametrize(
    ("turns", "steps"),
    [
        ("aaaa", 4),
        ("abab", 2),
        ("abbbbbabbbbbabbbbb", 12),  # one is called five times per step, the other once: the more frequent one counts
        ("aaabbbbbbbb", 7),  # the first is not used any more
        ("".join(chr(97 + number) for number in range(9)) * 3, 3),  # one per parameter
    ],
)
def test_steps_of_several_optimizers_are_counted_once(turns: str, steps: int) -> None:
    memory = memoryview(bytearray(status_slot.SIZE))
    counted = StepCounter(status_slot.StatusSlot(memory, 0))
    for name in turns:
        counted._stepped(ord(name))
    assert status_slot.read(memory, 0).step == steps
