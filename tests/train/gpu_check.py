"""Run by hand on a machine with an NVIDIA GPU: PYTHONPATH=src python tests/train/gpu_check.py

One process, one GPU, an NCCL group of one. Trains a small transformer in every way (fp32, bf16, fp16 with its scaler,
compiled, FSDP, each with accumulation and clipping), stops and resumes one, and compares the time of a step with raw
DDP. Prints a line for each, "ok" or "FAILED" first. `--cpu` runs everything without a GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import phalanx
from phalanx.train.model.wrapped import Wrapped

CPU = "--cpu" in sys.argv
DEVICE = torch.device("cpu") if CPU else torch.device("cuda", 0)
STEPS, ACCUMULATE = (12, 2) if CPU else (40, 2)
ROUNDS, EACH = (3, 4) if CPU else (60, 10)
WIDTH = 64 if CPU else 256
FAILED: list[str] = []


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
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, width), nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def text(batch: int = 8) -> torch.Tensor:
    """On the CPU: to be moved by the wrapper."""
    return torch.randint(0, 64, (batch, 64), generator=torch.Generator().manual_seed(0))


def wait() -> None:
    if not CPU:
        torch.cuda.synchronize()


@contextmanager
def runs(*, ddp: bool = False) -> Iterator[phalanx.Run]:
    """Yield a run in a group of one. `ddp`: it reports a world size of two, so that models are wrapped as in a larger
    one, with DDP and hooks.
    """
    with phalanx.Run(phalanx.init(device=str(DEVICE))) as run:
        if ddp:
            pretend(run, 2)
        yield run


def pretend(run: phalanx.Run, world_size: int) -> None:
    """Make a run of one rank report another world size."""
    placement = dataclasses.replace(run.group.membership.placement, world_size=world_size)
    run.group.membership = dataclasses.replace(run.group.membership, placement=placement)


def check(name: str, question: Callable[[], str]) -> None:
    """Run a check, which returns a text or raises."""
    torch.compiler.reset()  # otherwise compilations of earlier checks count towards the limit
    try:
        answer = question()
    except Exception as error:
        FAILED.append(name)
        answer = f"{type(error).__name__}: {error}"
    print(f"{'FAILED' if name in FAILED else 'ok':<8}{name:<26}{answer}", flush=True)


def expect(truth: bool, text: str) -> None:
    if not truth:
        raise AssertionError(text)


# -- every way to train

LAST: dict[str, float] = {}


def trains(name: str, how: str = "ddp", *, ddp: bool = False, **options: Any) -> None:
    def question() -> str:
        with runs(ddp=ddp) as run:
            net = model()
            # Before it is wrapped, as a user may: on the CPU, and with FSDP for parameters that will be replaced.
            opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
            wrapped = run.wrap(net, how, accumulate=ACCUMULATE, **options)
            return judged(name, run, wrapped, opt)

    check(name, question)


def judged(name: str, run: phalanx.Run, wrapped: Wrapped, opt: torch.optim.Optimizer) -> str:
    tokens = text()
    target = tokens.roll(1, 1).to(DEVICE)
    losses: list[torch.Tensor] = []
    skipped, began = 0, 0.0
    for number in range(STEPS * ACCUMULATE):
        if number == STEPS * ACCUMULATE // 2:
            wait()
            began = time.perf_counter()
        output = wrapped(tokens)
        loss = cross_entropy(output.flatten(0, 1), target.flatten())
        run.backward(loss)
        skipped += run.step(opt, clip=1.0, loss=loss).skipped
        losses.append(loss.detach())
    wait()
    each = (time.perf_counter() - began) / (STEPS * ACCUMULATE // 2)
    with torch.no_grad():
        evaluated = wrapped(tokens)
    parameter = next(wrapped.parameters())
    first, last = losses[0].item(), losses[-1].item()
    LAST[name] = last
    expect(last < (0.9 if CPU else 0.5) * first, f"the loss did not fall: {first:.4f} -> {last:.4f}")
    kinds = {output.dtype, evaluated.dtype, parameter.dtype}
    expect(kinds == {torch.float32}, f"output, evaluation and parameters are {kinds}, not all in fp32")
    expect(parameter.device == DEVICE, f"the model is on {parameter.device}")
    scale = "" if wrapped.scaler is None else f", scale {wrapped.scaler.get_scale():.0f}, {skipped} skipped"
    return f"loss {first:.4f} -> {last:.4f}, {1000 * each:.2f} ms a micro-batch{scale}"


def agree(name: str, other: str) -> None:
    def question() -> str:
        expect(abs(LAST[name] - LAST[other]) < 0.05 * LAST[other] + 0.01, f"{LAST[name]:.4f} and {LAST[other]:.4f}")
        return f"end with a loss of {LAST[name]:.4f} and {LAST[other]:.4f}"

    check(f"{name} as {other}", question)


def batchnorm() -> str:
    with runs(ddp=True) as run:
        wrapped = run.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), sync_batchnorm=True)
        wrapped(torch.randn(4, 8)).sum().backward()
        expect(isinstance(wrapped.module[1], nn.SyncBatchNorm), "BatchNorm was not converted")
    return "converted, and went back and forth"


# -- a whole training


def resumes(how: str, **options: Any) -> Callable[[], str]:
    """With data from the loader, dropout, a checkpoint every 3 steps; stopped after 7 of 12 steps, and continued."""

    def train(folder: str, stop: int | None) -> tuple[int, list[float]]:
        with runs(ddp=how == "ddp") as run:
            run.group.seed_everything()
            net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16))
            opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
            wrapped = run.wrap(net, how, **options)
            pretend(run, 1)  # the data is that of one rank
            samples = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
            data = run.loader(TensorDataset(samples), batch_size=8, shuffle=True)
            run.checkpoints(folder, every=3)
            run.keep(model=net, opt=opt, data=data)
            began = run.steps
            for _ in run.epochs(3):
                for (x,) in run.batches(data):
                    expect(x.device == DEVICE, f"a batch is on {x.device}")
                    loss = mse_loss(wrapped(x), x)
                    run.backward(loss)
                    run.step(opt, clip=1.0, loss=loss)
                    if run.steps == stop:
                        return began, []
            return began, [getattr(p, "full_tensor", lambda p=p: p)().sum().item() for p in net.parameters()]

    def question() -> str:
        with tempfile.TemporaryDirectory() as folder:
            _, whole = train(f"{folder}/whole", None)
            train(f"{folder}/parts", 7)
            began, end = train(f"{folder}/parts", None)
        expect(began == 6, f"resumed at step {began}, not 6")
        expect(end == whole, f"{end} after it was resumed, {whole} in one go")
        return "resumed at step 6, bit for bit as in one go"

    return question


# -- the time of a step


def times(name: str, *, precision: str | None = None, compile: bool = False) -> None:  # noqa: A002
    """Raw DDP and Run in turns. Raw twice: the difference between its two runs is the noise."""

    def question() -> str:
        with runs(ddp=True) as run, tempfile.TemporaryDirectory() as folder:
            run.group.folder = folder
            loops = {
                "raw": raw(precision, compile),
                "again": raw(precision, compile),
                "run": through(run, precision, compile),
            }
            for loop in loops.values():
                loop(2 * EACH)
            taken: dict[str, list[float]] = {loop: [] for loop in loops}
            names = list(loops)
            for number in range(ROUNDS):
                for which in (*names[number % 3 :], *names[: number % 3]):
                    wait()
                    began = time.perf_counter()
                    loops[which](EACH)
                    wait()
                    taken[which].append((time.perf_counter() - began) / EACH)
            middle = {which: 1000 * statistics.median(taken[which]) for which in names}
            ratio = {
                which: statistics.median(a / b for a, b in zip(taken[which], taken["raw"], strict=True))
                for which in names
            }
        return (
            f"raw DDP {middle['raw']:.3f} ms, Run {middle['run']:.3f} ms: {ratio['run']:.4f} of raw "
            f"(raw of itself {ratio['again']:.4f})"
        )

    check(name, question)


def raw(precision: str | None, compiled: bool) -> Callable[[int], None]:
    net = model().to(DEVICE)
    if compiled:
        net.compile()
    ddp = DistributedDataParallel(net, device_ids=None if CPU else [0], gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    tokens = text().to(DEVICE)
    target = tokens.roll(1, 1).flatten()
    low = torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=precision == "bf16")

    def loop(steps: int) -> None:
        for _ in range(steps):
            with low:
                output = ddp(tokens)
            loss = cross_entropy(output.float().flatten(0, 1), target)
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)

    return loop


def through(run: phalanx.Run, precision: str | None, compiled: bool) -> Callable[[int], None]:
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ddp = run.wrap(net, precision=precision, compile=compiled)
    tokens = text().to(DEVICE)
    target = tokens.roll(1, 1).flatten()

    def loop(steps: int) -> None:
        for _ in range(steps):
            loss = cross_entropy(ddp(tokens).flatten(0, 1), target)
            run.backward(loss)
            run.step(opt, loss=loss)

    return loop


def main() -> int:
    if not CPU and not torch.cuda.is_available():
        print("no GPU that torch can use")
        return 1
    here = phalanx.init("gloo" if CPU else "cpu:gloo,cuda:nccl", rank=0, world_size=1, device="cpu" if CPU else None)
    expect(dist.is_initialized() and here.device == DEVICE, f"no group, or another device: {here!r}")
    name = "CPU" if CPU else f"{torch.cuda.get_device_name(DEVICE)}, NCCL {torch.cuda.nccl.version()}"
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}, {here!r}")
    trains("plain")
    trains("bf16", precision="bf16")
    trains("fp16, scaled", precision="fp16")
    trains("compiled", compile=True)
    trains("compiled, bf16", compile=True, precision="bf16")
    trains("DDP", ddp=True)
    trains("DDP, static graph", ddp=True, static_graph=True)
    trains("DDP, bf16, compiled", ddp=True, precision="bf16", compile=True)
    trains("DDP, fp16, scaled", ddp=True, precision="fp16")
    for compress in ("fp16", "bf16", "powersgd"):
        trains(f"DDP, sends {compress}", ddp=True, compress=compress)
    trains("FSDP", "fsdp")
    trains("FSDP, by blocks", "fsdp", shard=Block)
    trains("FSDP, bf16", "fsdp", shard=Block, precision="bf16")
    trains("FSDP, fp16, scaled", "fsdp", shard=Block, precision="fp16")
    trains("FSDP, bf16, compiled", "fsdp", shard=Block, precision="bf16", compile=True)
    trains("DataParallel", "dp")
    for way in ("DDP", "FSDP", "DataParallel"):
        agree(way, "plain")
    if not CPU:
        check("sync_batchnorm", batchnorm)
    check("DDP, bf16, resumed", resumes("ddp", precision="bf16"))
    check("DDP, fp16, resumed", resumes("ddp", precision="fp16"))
    check("FSDP, resumed", resumes("fsdp"))
    times("a step, fp32")
    times("a step, bf16", precision="bf16")
    times("a step, bf16, compiled", precision="bf16", compile=True)

    def closes() -> str:
        began = time.perf_counter()
        here.close()
        expect(not dist.is_initialized(), "the group is still there")
        return f"in {time.perf_counter() - began:.1f} s"

    check("closed", closes)
    print(f"{len(FAILED)} failed: {', '.join(FAILED)}" if FAILED else "all well")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
