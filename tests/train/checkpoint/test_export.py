"""Export of a model to one file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from phalanx.errors import OptionError
from phalanx.train.checkpoint import CheckpointError, export
from tests.train.checkpoint.trainings import Odd, equal


def test_export(tmp_path: Path) -> None:
    model = nn.DataParallel(Odd())
    want = {name: value for name, value in model.module.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(
        CheckpointError, match=r"complex128 is of torch.complex128, which safetensors does not support"
    ) as caught:
        export(model, tmp_path / "model.safetensors")
    assert caught.value.fix == "export it to a .pt file"
    export(model, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == want.keys()
    assert all(equal(found[name], want[name]) for name in want)
    del model.module.complex128, want["complex128"]
    export(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == want.keys()
    assert all(equal(found[name], want[name]) for name in want)
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.safetensors"]


def test_export_of_a_view_omits_its_base(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.ones(1 << 20)[:4]])
    export(model, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1 << 16


def test_export_is_all_or_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"must end in \.safetensors or \.pt"):
        export(model, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        export(model, tmp_path / "nowhere" / "model.safetensors")
    (tmp_path / "model.pt").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        export(model, tmp_path / "model.pt")
    assert os.listdir(tmp_path) == ["model.pt"]
