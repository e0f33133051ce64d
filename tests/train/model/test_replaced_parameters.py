"""Optimizers that were created before FSDP sharded their parameters, on one of four ranks that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.train.model import replaced_parameters
from phalanx.train.model.replaced_parameters import ReplacedParameters


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Two replicas of two shards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it otherwise
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def stepped() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    opt = torch.optim.AdamW(parameters, lr=0.1)
    sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    opt.step()
    return parameters, opt


def sharded(parameters: list[nn.Parameter], mesh: DeviceMesh) -> ReplacedParameters:
    placements = (Replicate(), Shard(0))
    after = [nn.Parameter(distribute_tensor(one.detach(), mesh, placements, src_data_rank=None)) for one in parameters]
    return ReplacedParameters(list(zip(parameters, after, strict=True)))


def test_the_state_of_an_optimizer_is_sharded_without_other_ranks(mesh: DeviceMesh) -> None:
    """They may have lost the group. Ranks that have no state yet would call nothing, and both would wait forever."""
    parameters, opt = stepped()
    whole = [opt.state[parameter]["exp_avg"].clone() for parameter in parameters]
    sharded(parameters, mesh).adopt(opt)
    now = opt.param_groups[0]["params"]
    assert [*opt.state] == now
    for parameter, expected in zip(now, whole, strict=True):
        part: Any = opt.state[parameter]["exp_avg"]
        torch.testing.assert_close(part.to_local(), expected[2:])
        assert part.to_local().untyped_storage().nbytes() == expected[2:].nbytes


def test_an_optimizer_changes_at_once_or_not_at_all(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, opt = stepped()
    plain, calls = replaced_parameters._alike, []

    def fails(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > 4:  # in the second parameter
            raise RuntimeError("Connection closed by peer")
        return plain(*given)

    monkeypatch.setattr(replaced_parameters, "_alike", fails)
    with pytest.raises(RuntimeError):
        sharded(parameters, mesh).adopt(opt)
    assert opt.param_groups[0]["params"] == parameters
    assert {*opt.state} == {*parameters}
    opt.state_dict()
