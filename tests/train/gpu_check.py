"""Run by hand on a machine with an NVIDIA GPU: python tests/train/gpu_check.py

One process, one GPU, an NCCL group of one. Trains a small transformer in every way there is (fp32, bf16, fp16 with its
scaler, compiled, FSDP, each with accumulation and clipping), prints the first and last loss and the time of a step, and
fails where a loss does not fall, where two ways that should agree do not, or where the group cannot be closed.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import torch.distributed as dist
from torch import nn

from phalanx.errors import UsageError
from phalanx.train.wrap import wrap
from phalanx.train.wrapped import Wrapped

STEPS, ACCUMULATE = 40, 2
DEVICE = torch.device("cuda", 0)
WRONG: list[str] = []


class Party:
    world_size = 1
    device = DEVICE

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def before_close(self, call: Callable[[], object]) -> None:
        self.calls.append(call)


class Several(Party):
    """Says two, so that a group of one is wrapped as a larger one would be: DDP and its hooks for real."""

    world_size = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.net(self.second(x))


class Model(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, width), nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(wrapped: Wrapped, opt: torch.optim.Optimizer) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (8, 64), generator=generator)  # on the CPU: to be moved by the wrapper
    target = tokens.roll(1, 1).to(DEVICE)
    losses: list[torch.Tensor] = []
    skipped = 0
    began = 0.0
    for number in range(STEPS * ACCUMULATE):
        if number == STEPS * ACCUMULATE // 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        output = wrapped(tokens)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        wrapped.backward(loss)
        update = wrapped.step(opt, accumulate=ACCUMULATE, clip=1.0)
        skipped += update.skipped
        losses.append(loss.detach())
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / (STEPS * ACCUMULATE // 2)
    with torch.no_grad():
        evaluated = wrapped(tokens.to(DEVICE))
    return {
        "first": losses[0].item(),
        "last": losses[-1].item(),
        "ms": 1000 * each,
        "skipped": skipped,
        "dtypes": (output.dtype, evaluated.dtype, next(wrapped.parameters()).dtype),
    }


def check(name: str, party: Party, how: str = "ddp", **options: Any) -> float:
    torch.manual_seed(0)
    model = Model()
    # Before it is wrapped, as a user may: on the CPU, and with FSDP for parameters that will be replaced.
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        wrapped = wrap(model, how, group=party, accumulate=ACCUMULATE, **options)
        found = train(wrapped, opt)
    except Exception as error:
        WRONG.append(f"{name}: {type(error).__name__}: {error}")
        print(f"{name:<28}{WRONG[-1]}")
        return float("nan")
    scale = "" if wrapped.scaler is None else f", scale {wrapped.scaler.get_scale():.0f}, {found['skipped']} skipped"
    print(f"{name:<28}loss {found['first']:.4f} -> {found['last']:.4f}, {found['ms']:.2f} ms a micro-batch{scale}")
    if not found["last"] < 0.5 * found["first"]:
        WRONG.append(f"{name}: the loss did not fall")
    if set(found["dtypes"]) != {torch.float32}:
        WRONG.append(f"{name}: output, evaluation and parameters are {found['dtypes']}, not all in fp32")
    if next(wrapped.parameters()).device != DEVICE:
        WRONG.append(f"{name}: the model is on {next(wrapped.parameters()).device}")
    return float(found["last"])


def batchnorm(party: Party) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wrapped = wrap(model, group=party, sync_batchnorm=True)
    wrapped(torch.randn(4, 8)).sum().backward()
    if not isinstance(wrapped.module[1], nn.SyncBatchNorm):
        WRONG.append("sync_batchnorm: BatchNorm was not converted")


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
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    one, several = Party(), Several()
    plain = check("plain", one)
    check("bf16", one, precision="bf16")
    check("fp16, scaled", one, precision="fp16")
    check("compiled", one, compile=True)
    check("compiled, bf16", one, compile=True, precision="bf16")
    ddp = check("DDP", several)
    check("DDP, static graph", several, static_graph=True)
    check("DDP, bf16, compiled", several, precision="bf16", compile=True)
    check("DDP, fp16, scaled", several, precision="fp16")
    for compress in ("fp16", "bf16", "powersgd"):
        check(f"DDP, sends {compress}", several, compress=compress)
    fsdp = check("FSDP", one, "fsdp")
    check("FSDP, by blocks", one, "fsdp", shard=Block)
    check("FSDP, bf16", one, "fsdp", shard=Block, precision="bf16")
    check("FSDP, fp16, scaled", one, "fsdp", shard=Block, precision="fp16")
    check("FSDP, bf16, compiled", one, "fsdp", shard=Block, precision="bf16", compile=True)
    check("DataParallel", one, "dp")
    for name, last in (("DDP", ddp), ("FSDP", fsdp)):
        if not abs(last - plain) < 0.05 * plain + 0.01:
            WRONG.append(f"{name} ended with a loss of {last:.4f}, plain with {plain:.4f}")
    batchnorm(several)
    try:
        wrap(Model(), group=one, precision="fp8")
        WRONG.append("precision=fp8 was taken")
    except UsageError:
        pass
    for call in (*one.calls, *several.calls):
        call()
    began = time.perf_counter()
    dist.destroy_process_group()
    print(f"closed in {time.perf_counter() - began:.1f} s")
    print(*(WRONG or ["all well"]), sep="\n")
    return 1 if WRONG else 0


if __name__ == "__main__":
    sys.exit(main())
