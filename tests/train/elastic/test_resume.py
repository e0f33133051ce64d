"""Killed at a random step and resumed: the same parameters as an undisturbed run, every sample once per epoch."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.cli import Env, Result, phalanx, warm_environment

pytestmark = pytest.mark.xdist_group("resume")  # they share undisturbed runs
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "resume.py")
LENGTH, STEPS, EPOCHS = 51, 15, 3  # as in the script
SETTINGS: dict[str, Any] = {
    "how": "ddp",
    "stream": False,
    "accumulate": 1,
    "dropout": 0.0,
    "noise": 0.0,
    "workers": 0,
    "kill": None,
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"how": "ddp", "workers": 1},
    "fsdp": {"how": "fsdp", "accumulate": 2},
}
FSDP = pytest.param("fsdp", marks=pytest.mark.extended)
STREAM = pytest.param("stream", marks=pytest.mark.extended)


@pytest.fixture
def dice() -> random.Random:
    """PHALANX_DICE=… repeats an earlier sequence."""
    seed = os.environ.get("PHALANX_DICE") or str(random.SystemRandom().randrange(10_000))
    print(f"PHALANX_DICE={seed}")
    return random.Random(seed)


class Stage:
    """Many short runs, for which torch is imported once."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.wholes: dict[str, dict[str, torch.Tensor]] = {}

    def run(self, folder: Path, ranks: int, name: str, *options: str, **settings: Any) -> Result:
        arguments = json.dumps({**SETTINGS, **settings, "name": name})
        print(f"{ranks} ranks: {arguments}")
        # A death ends the run: the next one is tested.
        words = ("run", "-g", str(ranks), "--cpu", "--max-restarts", "0", *options, SCRIPT, str(folder), arguments)
        return phalanx(*words, env=self.env, timeout=120)

    def whole(self, folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
        """Return the parameters of an undisturbed run on 2 ranks."""
        key = json.dumps(settings)
        if key not in self.wholes:
            self.wholes[key] = finished(self.run(folder, 2, "whole", **settings), folder, "whole")
        return self.wholes[key]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with warm_environment() as env:
        yield Stage(env)
        for left in Path(str(env["TMPDIR"])).glob("pymp-*"):  # a killed rank leaves files of multiprocessing
            shutil.rmtree(left)


def finished(done: Result, folder: Path, name: str) -> dict[str, torch.Tensor]:
    assert done.code == 0, done.out + done.err
    assert f"done after {STEPS} steps" in done.out
    return load_file(folder / f"{name}.safetensors")


def kill(dice: random.Random, ranks: int, steps: range) -> dict[str, Any]:
    return {"kill": [dice.randrange(ranks), dice.choice(steps), dice.choice(["forward", "step", "checkpoint"])]}


def committed(folder: Path, runs: list[tuple[str, int]]) -> tuple[dict[int, Counter[int]], list[dict[str, Any]]]:
    """Return samples by epoch, of all steps that no later process has undone, and where each process continued."""
    steps: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lives = []
    for name, ranks in runs:
        notes = [
            [json.loads(line) for line in (folder / f"{name}-{rank}").read_text().splitlines()] for rank in range(ranks)
        ]
        # Each rank's notes are divided by process; all ranks restart together.
        split = [_lives(one) for one in notes]
        for together in zip(*split, strict=True):
            first = together[0][0]
            assert all(life[0] == first for life in together)
            lives.append(first)
            for step in [step for step in steps if step > first["resumed"]]:
                del steps[step]
            for note in (note for life in together for note in life[1:]):
                steps[note["step"]] += [(note["epoch"], sample) for sample in note["samples"]]
    assert sorted(steps) == list(range(1, STEPS + 1))
    epochs: dict[int, Counter[int]] = defaultdict(Counter)
    for epoch, sample in (pair for step in steps.values() for pair in step):
        epochs[epoch][sample] += 1
    return epochs, lives


def _lives(notes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    for note in notes:
        if "resumed" in note:
            found.append([])
        found[-1].append(note)
    return found


def exactly_once(epochs: dict[int, Counter[int]]) -> bool:
    return [epochs[epoch] for epoch in range(EPOCHS)] == [Counter(range(LENGTH))] * EPOCHS


@pytest.mark.parametrize("case", ["ddp", FSDP, STREAM])
def test_bit_for_bit_at_the_same_number_of_ranks(case: str, tmp_path: Path, dice: random.Random, stage: Stage) -> None:
    """With dropout, and data with new noise every time."""
    settings = {**CASES.get(case, {"stream": True, "workers": 1}), "dropout": 0.2, "noise": 0.1}
    kept = ("--checkpoints", str(tmp_path / "kept"), "--checkpoint-every", "1")
    assert stage.run(tmp_path, 2, "again", *kept, **settings, **kill(dice, 2, range(4, STEPS))).code
    done = stage.run(tmp_path, 2, "again", *kept, **settings)
    found = finished(done, tmp_path, "again")
    epochs, lives = committed(tmp_path, [("again", 2)])
    assert len(lives) == 2
    assert lives[1]["resumed"] >= 1
    if lives[1]["resumed"] % (STEPS // EPOCHS):  # in mid-epoch a stream continues from its own state
        assert lives[1]["workers_known"] is (case == "stream")
    assert exactly_once(epochs)
    expected = stage.whole(tmp_path, **settings)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.extended
@pytest.mark.parametrize("case", ["ddp", FSDP])
def test_at_another_number_of_ranks(case: str, tmp_path: Path, dice: random.Random, stage: Stage) -> None:
    """From 2 to 3 to 1, each in its own run."""
    settings = CASES[case]
    kept = ("--checkpoints", str(tmp_path / "kept"), "--checkpoint-every", "1")
    for ranks, steps in ((2, range(4, 8)), (3, range(10, STEPS))):
        dead = stage.run(tmp_path, ranks, f"on{ranks}", *kept, **settings, **kill(dice, ranks, steps))
        assert dead.code == 128 + signal.SIGKILL, dead.out + dead.err
    found = finished(stage.run(tmp_path, 1, "on1", *kept, **settings), tmp_path, "on1")
    epochs, lives = committed(tmp_path, [("on2", 2), ("on3", 3), ("on1", 1)])
    assert 0 == lives[0]["resumed"] < lives[1]["resumed"] < lives[2]["resumed"]
    assert exactly_once(epochs)
    expected = stage.whole(tmp_path)  # without accumulation, and by DDP: it is the same training
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
