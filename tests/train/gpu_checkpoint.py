"""Run by hand on a machine with an NVIDIA GPU: python tests/train/gpu_checkpoint.py [FOLDER]

One process, one GPU, an NCCL group of one. Saves and loads state on a GPU (plain and FSDP, fp32 and bf16, a fused
optimizer, random numbers) while training continues, and compares it bit for bit. Measures the cost of a save relative
to one copy of the state from the device to pinned memory: the time that the training thread is blocked, and the total
time that steps lose. Fails if something differs, or if either exceeds 1.5 copies.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from phalanx.train.checkpoint import Checkpoints, export

DEVICE = torch.device("cuda", 0)
LIMIT = 1.5
WRONG: list[str] = []


class Training:
    def __init__(self, width: int, layers: int, dtype: torch.dtype, *, sharded: bool = False) -> None:
        torch.manual_seed(1)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Dropout(0.1))]
        self.model = nn.Sequential(*parts).to(DEVICE, dtype)
        if sharded:
            mesh = init_device_mesh("cuda", (1,))
            for part in self.model[::2]:
                fully_shard(part, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batch = torch.randn(256, width, device=DEVICE, dtype=dtype)

    @property
    def kept(self) -> dict[str, object]:
        return {"model": self.model, "opt": self.opt}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(self.batch).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        found = [*self.model.state_dict().values()]
        found += [value for state in self.opt.state.values() for value in state.values()]
        return [value.to_local() if isinstance(value, DTensor) else value for value in found]

    def values(self) -> list[torch.Tensor]:
        return [tensor.detach().cpu().clone() for tensor in self.tensors()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def expect(good: bool, what: str) -> None:
    print(f"{'good' if good else 'WRONG':<8}{what}")
    if not good:
        WRONG.append(what)


def there_and_back(folder: str, dtype: torch.dtype, *, sharded: bool) -> None:
    name = f"{'fsdp' if sharded else 'plain'}, {str(dtype).removeprefix('torch.')}"
    first = Training(1024, 8, dtype, sharded=sharded)
    with Checkpoints(folder) as checkpoints:
        first.steps(3)
        at_save = first.values()
        checkpoints.save(3, first.kept)
        first.steps(3)  # at once: the copy must contain the earlier state
        checkpoints.wait()
        buffers = checkpoints._queue.free
        expect(any(buffer._pinned for buffer in buffers), f"{name}: the buffer is pinned")
    second = Training(1024, 8, dtype, sharded=not sharded)
    second.steps(1)
    with Checkpoints(folder) as checkpoints:
        info = checkpoints.load(second.kept)
    expect(info is not None and info.step == 3, f"{name}: found again")
    expect(same(second.values(), at_save), f"{name}: loaded as {'plain' if sharded else 'fsdp'}, to the bit")
    second.steps(3)
    close = all(torch.allclose(a, b) for a, b in zip(second.values(), first.values(), strict=True))
    expect(close, f"{name}: continues with the same numbers, including dropout")
    export(second.model, f"{folder}/model.safetensors")
    expect(Path(folder, "model.safetensors").stat().st_size > 8 * 1024**2 * dtype.itemsize, f"{name}: exported")


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def stall(folder: str, layers: int) -> None:
    training = Training(4096, layers, torch.float32)
    training.steps(3)
    tensors = training.tensors()
    size = sum(tensor.nbytes for tensor in tensors)
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]

    def copy() -> None:
        for tensor, target in zip(tensors, pinned, strict=True):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def some_steps() -> None:
        training.steps(10)
        torch.cuda.synchronize()

    copies, held, lost, firsts = [], [], [], 0.0
    with Checkpoints(folder, keep_last=1) as checkpoints:
        checkpoints.open()
        for number in range(6):

            def save(number: int = number) -> None:
                checkpoints.save(number, training.kept)

            def save_and_go_on(save: Callable[[], None] = save) -> float:
                began = time.perf_counter()
                save()
                seconds = time.perf_counter() - began
                some_steps()
                return seconds

            copies.append(timed(copy))
            alone = statistics.median(timed(some_steps) for _ in range(3))
            torch.cuda.synchronize()
            began = time.perf_counter()
            seconds = save_and_go_on()
            if number == 0:
                firsts = seconds
            else:
                held.append(seconds)
                lost.append(time.perf_counter() - began - alone)
            checkpoints.wait()
    one = statistics.median(copies[1:])
    kept, gone = statistics.median(held), statistics.median(lost)
    print(
        f"{size / 2**30:.2f} GiB: one copy to pinned memory {1000 * one:.1f} ms ({size / one / 1e9:.0f} GB/s); "
        f"the thread was held {1000 * kept:.1f} ms ({kept / one:.2f} copies), "
        f"10 steps took {1000 * gone:.1f} ms longer ({gone / one:.2f} copies); the first save {1000 * firsts:.0f} ms"
    )
    expect(kept <= LIMIT * one, f"the thread is held for at most {LIMIT} copies")
    expect(gone <= LIMIT * one, f"steps lose at most {LIMIT} copies")


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU that torch can use")
        return 1
    torch.cuda.set_device(DEVICE)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, device_id=DEVICE
    )
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}")
    place = sys.argv[1] if len(sys.argv) > 1 else None
    for dtype in (torch.float32, torch.bfloat16):
        for sharded in (False, True):
            with tempfile.TemporaryDirectory(dir=place) as folder:
                there_and_back(folder, dtype, sharded=sharded)
    for layers in (3, 20):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            stall(folder, layers)
    dist.destroy_process_group()
    for line in WRONG:
        print(f"WRONG: {line}")
    return 1 if WRONG else 0


if __name__ == "__main__":
    sys.exit(main())
