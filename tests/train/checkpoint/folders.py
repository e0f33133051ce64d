"""Checkpoint folders: made, listed and damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.train.checkpoint import Checkpoints

FILES = ("manifest.json", "state.json", "rank-00000.json", "rank-00000.safetensors")


def saved(folder: Path, *steps: int, **options: Any) -> nn.Linear:
    """Save a model at each step, with the step as its weights."""
    model = nn.Linear(32, 16)
    with Checkpoints(folder, **{"keep_last": 9, **options}) as checkpoints:
        for step in steps:
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoints.save(step, {"model": model}, metrics={"loss": abs(step - 2.5)})
    return model


def steps(folder: Path) -> list[int]:
    return [int(name[5:]) for name in sorted(os.listdir(folder)) if name.startswith("step-")]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def flip_first(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
