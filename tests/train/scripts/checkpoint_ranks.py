"""Ranks that save and load: `checkpoint_ranks.py FOLDER PLAY...`. torch is imported once, each rank is a fork."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
import torch._dynamo  # what an optimizer imports: once, not in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.train.checkpoint import CheckpointError, Checkpoints, export


class Gloo:
    """The other ranks, over an existing group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def gather(self, obj: Any, *, all: bool = False) -> list[Any]:  # noqa: A002
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(obj)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        longest = max(int(one) for one in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        got = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(got, padded)
        return [msgspec.msgpack.decode(bytes(one[: int(n)].tolist())) for one, n in zip(got, sizes, strict=True)]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.gather(obj)[src]


def ranks(world_size: int, run_rank: Callable[[int], None], expected: Sequence[int] = ()) -> None:
    """Fork this many ranks, and check that they end as expected; default: successfully."""
    with tempfile.NamedTemporaryFile(delete=False) as store:
        pass
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                dist.init_process_group(
                    "gloo", store=dist.FileStore(store.name, world_size), rank=rank, world_size=world_size
                )
                run_rank(rank)
                dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if os.path.exists(store.name):
        os.unlink(store.name)
    if codes != list(expected or [0] * world_size):
        sys.exit(f"ranks ended with {codes}")


class Net(nn.Module):
    """Rows that three ranks cannot divide evenly, a bias smaller than their number, a tie, bf16, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 7)
        self.head.weight = self.body[0].weight
        self.brief = nn.Linear(7, 2).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.brief(self.head(self.body(x)).to(torch.bfloat16)).float()


def whole(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """All parameters, buffers and optimizer state, unsharded, by plain names."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {f"model.{key}": value for key, value in inner.state_dict().items()}
    names = {parameter: key for key, parameter in inner.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found.update({f"opt.{names[parameter]}.{key}": value for key, value in state.items()})
    return {key: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for key, value in found.items()}


def wrapped(strategy: str, world_size: int) -> nn.Module:
    model = Net()
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        for part in (model.body[3], model.brief):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def resume(folder: str) -> None:
    """Train two steps each as DDP, FSDP and single, at 2, 3 and 1 ranks, each from the state of the previous one."""
    stages = [("ddp", 2), ("fsdp", 3), ("single", 1), ("fsdp", 2), ("ddp", 3), ("fsdp", 1)]
    for number, (strategy, world_size) in enumerate(stages):

        def run_rank(rank: int, number: int = number, strategy: str = strategy, world_size: int = world_size) -> None:
            model = wrapped(strategy, world_size)
            named = dict(model.named_parameters())
            adam = torch.optim.AdamW([named[name] for name in named if "brief" not in name], lr=0.1, fused=True)
            sgd = torch.optim.SGD([named[name] for name in named if "brief" in name], lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [3, 5])
            generator = torch.Generator().manual_seed(rank)
            kept = {"model": model, "adam": adam, "sgd": sgd, "schedule": schedule}
            with Checkpoints(f"{folder}/checkpoints", Gloo(), generators=[generator]) as checkpoints:
                info = checkpoints.load(kept)
                assert (info.step if info else 0) == 2 * number, info
                if info:
                    assert info.extra == {"consumed": 16 * number, "who": stages[number - 1][0]}
                    # Each rank has its own random numbers, also a new rank.
                    drawn = [torch.rand(1).item(), torch.rand(1, generator=generator).item()]
                    assert len({str(one) for one in Gloo().gather(drawn)}) == world_size
                    if number > 1 and rank < stages[number - 1][1]:
                        assert drawn == torch.load(f"{folder}/{number - 1}-next-{rank}.pt", weights_only=True)
                torch.save(whole(model, [adam, sgd]), f"{folder}/{number}-in-{rank}.pt")
                for step in range(2):
                    torch.manual_seed(1000 * number + 10 * step + rank)
                    model(torch.randn(8, 6)).square().mean().backward()
                    for optimizer in (adam, sgd):
                        optimizer.step()
                        optimizer.zero_grad()
                    schedule.step()
                assert schedule.last_epoch == 2 * (number + 1)
                torch.save(whole(model, [adam, sgd]), f"{folder}/{number}-out-{rank}.pt")
                checkpoints.save(2 * (number + 1), kept, {"consumed": 16 * (number + 1), "who": strategy})
                drawn = [torch.rand(1).item(), torch.rand(1, generator=generator).item()]
                torch.save(drawn, f"{folder}/{number}-next-{rank}.pt")
                checkpoints.wait()
                assert checkpoints.latest().step == 2 * (number + 1)
            export(model, f"{folder}/{number}.safetensors", Gloo())
            export(model, f"{folder}/{number}.pt", Gloo())
            with pytest.raises(CheckpointError, match="No such file or directory"):
                export(model, f"{folder}/nowhere/{number}.safetensors", Gloo())

        ranks(world_size, run_rank)


def one_fails(folder: str) -> None:
    """Rank 1 can write only a few pages: all ranks get the error, and earlier checkpoints are kept."""

    def run_rank(rank: int) -> None:
        torch.manual_seed(3)
        model = nn.Linear(64, 1024)
        want = model.weight.detach().clone()
        with Checkpoints(folder, Gloo()) as checkpoints:
            checkpoints.save(1, {"model": model})
            checkpoints.wait()
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            big = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(2))
            checkpoints.save(2, {"model": big})
            with pytest.raises(CheckpointError, match="step 2 was not written") as caught:
                checkpoints.wait()
            assert any(line.startswith("rank 1: File too large") for line in caught.value.details), caught.value
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            dist.barrier()
            assert sorted(os.listdir(folder)) == [".lock", "step-000000000001"]
            model.weight.data.zero_()
            assert checkpoints.load({"model": model}).step == 1
            assert torch.equal(model.weight, want)
            checkpoints.save(3, {"model": model})
            checkpoints.wait()
            assert checkpoints.latest().step == 3

    ranks(2, run_rank)


def not_shared(folder: str) -> None:
    """Every rank has its own folder, as on a disk that nodes do not share."""

    def run_rank(rank: int) -> None:
        with Checkpoints(f"{folder}/{rank}", Gloo()) as checkpoints:
            with pytest.raises(CheckpointError, match="not all ranks see the same folder") as caught:
                checkpoints.save(1, {"model": nn.Linear(2, 2)})
            assert "rank 1" in caught.value.details[0]

    ranks(2, run_rank)


def one_dies(folder: str) -> None:
    """Rank 1 is killed while it writes: there is no checkpoint of that step, and rank 0 does not wait forever."""

    def run_rank(rank: int) -> None:
        model = nn.Linear(64, 1024)
        checkpoints = Checkpoints(folder, Gloo())
        checkpoints.save(1, {"model": model})
        checkpoints.wait()
        if rank == 1:
            os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(2, {"model": model})
        began = time.monotonic()
        with pytest.raises(RuntimeError):  # gloo's: the other is gone
            checkpoints.close(patience=0.5)
        assert time.monotonic() - began < 60  # and not the patience of ten minutes
        assert sorted(os.listdir(folder)) == [".lock", "step-000000000001"]
        assert Checkpoints(folder).load({"model": model}).step == 1
        os._exit(0)  # the other rank is dead: no orderly shutdown

    ranks(2, run_rank, [0, -signal.SIGKILL])


def one_is_bad(folder: str) -> None:
    """A file of rank 1 is missing, another is corrupted: all ranks skip those, and rank 0 reports it."""

    def run_rank(rank: int) -> None:
        model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        messages: list[str] = []
        with Checkpoints(folder, Gloo(), keep_last=9, say=messages.append) as checkpoints:
            for step in (1, 2, 3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(step)
                checkpoints.save(step, {"model": model})
            checkpoints.wait()
            if rank == 0:
                os.unlink(f"{folder}/step-000000000003/rank-00001.safetensors")
                with open(f"{folder}/step-000000000002/rank-00001.safetensors", "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"!")
            dist.barrier()
            assert checkpoints.load({"model": model}).step == 1
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())
        if rank == 0:
            gone, flipped = messages
            assert "step-000000000003/rank-00001.safetensors: No such file or directory" in gone
            assert "step-000000000002/rank-00001.safetensors: model." in flipped
            assert ": checksum is " in flipped
        else:
            assert messages == []

    ranks(2, run_rank)


def no_entry(folder: str) -> None:
    """An error of rank 0 when reading or writing is the same on all ranks, and none keeps waiting."""

    def run_rank(rank: int) -> None:
        os.seteuid(65534)
        checkpoints = Checkpoints(f"{folder}/closed/inside", Gloo())
        with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*: Permission denied"):
            checkpoints.open()
        with pytest.raises(CheckpointError, match=r"cannot be read: .*: Permission denied"):
            checkpoints.load({})
        os.seteuid(0)

    os.makedirs(f"{folder}/closed", mode=0o700)
    ranks(2, run_rank)


def skips(folder: str) -> None:
    """Ranks agree on whether a save is skipped."""

    def run_rank(rank: int) -> None:
        model = nn.Linear(256, 256)
        with Checkpoints(folder, Gloo(), busy="skip", buffers=1, keep_last=100) as checkpoints:
            done = [step for step in range(1, 40) if checkpoints.save(step, {"model": model})]
            checkpoints.wait()
            assert len({str(one) for one in Gloo().gather(done)}) == 1
            assert done[0] == 1
            assert len(done) < 39  # a save is on the disk long after the next one is asked for
            names = sorted(name for name in os.listdir(folder) if name.startswith("step"))
            assert names == [f"step-{step:012d}" for step in done], (names, done)

    ranks(2, run_rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenarios = {
        scenario.__name__: scenario
        for scenario in (resume, one_fails, one_dies, one_is_bad, no_entry, not_shared, skips)
    }
    for name in sys.argv[2:]:
        os.mkdir(f"{sys.argv[1]}/{name}")
        scenarios[name](f"{sys.argv[1]}/{name}")
        print(f"{name} done", flush=True)
