"""The behavior of wrapped models on several ranks, one function per question. Every rank writes its observations as
JSON.

    phalanx run -g 2 behaviours.py FOLDER
"""

import copy
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from party import Party, mlp
from torch.nn.functional import mse_loss

from phalanx.errors import PhalanxError
from phalanx.train.checkpoint import state
from phalanx.train.model.compression import PowerSGD
from phalanx.train.model.wrap import wrap
from phalanx.train.model.wrapped import Wrapped

PARTY = Party()
QUESTIONS: list[Callable[[], Any]] = []


def question(function: Callable[[], Any]) -> Callable[[], Any]:
    QUESTIONS.append(function)
    return function


def data(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + PARTY.rank)
    x = torch.randn(samples, 6)
    return x, torch.stack([x.sum(1), x[:, 0]], 1)


def train(wrapped: Wrapped, steps: int = 12, lr: float = 0.05, **how: Any) -> dict[str, Any]:
    opt = torch.optim.SGD(wrapped.parameters(), lr=lr, momentum=0.9)
    x, y = data()
    losses, updates = [], []
    for _ in range(steps):
        loss = mse_loss(wrapped(x), y)
        wrapped.backward(loss)
        updates.append(wrapped.step(opt, **how))
        losses.append(loss.item())
    return {
        "first": losses[0],
        "last": losses[-1],
        "done": [update.done for update in updates],
        "skipped": [update.skipped for update in updates],
        "weights": weights(wrapped),
    }


def weights(model: torch.nn.Module) -> list[float]:
    return [getattr(value, "full_tensor", lambda v=value: v)().sum().item() for value in model.parameters()]


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except PhalanxError as error:
        return str(error)
    return ""


def counting(wrapped: Wrapped) -> list[int]:
    """Record one entry per bucket that is sent."""
    sent: list[int] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(PARTY.world_size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped._engine.register_comm_hook(None, hook)
    return sent


@question
def reductions() -> Any:
    """12 micro-batches: windows of 1, 4, and of 5 of which the last of all ends early."""
    found = {}
    for accumulate in (1, 4, 5):
        wrapped = wrap(mlp(), group=PARTY, accumulate=accumulate)
        sent = counting(wrapped)
        opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        x, y = data()
        done = []
        for number in range(12):
            if number == 11:
                wrapped.finish()
            mse_loss(wrapped(x), y).backward()
            done.append(wrapped.step(opt).done)
        found[str(accumulate)] = {"sent": len(sent), "done": done, "weights": weights(wrapped)}
    return found


@question
def learned() -> Any:
    """It was not declared when wrapping: the first step shows it. Later steps shorten the window."""
    wrapped = wrap(mlp(), group=PARTY)
    sent = counting(wrapped)
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x, y = data()
    done = []
    for accumulate in (3, 3, 3, 3, 3, 3, 4, 2, 2, 2, 2):
        mse_loss(wrapped(x), y).backward()
        done.append(wrapped.step(opt, accumulate=accumulate).done)
    return {"sent": len(sent), "done": done, "weights": weights(wrapped)}


@question
def static_graph() -> Any:
    plain = train(wrap(mlp(), group=PARTY, accumulate=2), steps=24)
    return {**train(wrap(mlp(), group=PARTY, static_graph=True, accumulate=2), steps=24), "plain": plain["weights"]}


@question
def find_unused() -> Any:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = mlp(), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    return train(wrap(Branches(), group=PARTY, find_unused=True))


@question
def compressed() -> Any:
    ways = {"fp16": "fp16", "bf16": "bf16", "powersgd": PowerSGD(rank=2, start=3)}
    return {name: train(wrap(mlp(), group=PARTY, compress=way), accumulate=2, steps=30) for name, way in ways.items()}


@question
def bf16() -> Any:
    found = {}
    for how in ("ddp", "fsdp"):
        wrapped = wrap(mlp(), how, group=PARTY, precision="bf16")
        x, _ = data()
        seen: list[str] = []
        handle = wrapped.module[2].register_forward_hook(
            lambda _m, _i, output, seen=seen: seen.append(str(output.dtype))
        )
        output = wrapped(x)
        handle.remove()
        with wrapped.autocast():
            beside = (x @ x.T).dtype
        found[how] = {
            **train(wrapped, clip=1.0),
            "inside": seen,
            "output": str(output.dtype),
            "beside": str(beside),
            "parameter": str(next(wrapped.parameters()).dtype),
        }
    return found


@question
def fp16() -> Any:
    found = {}
    for how in ("ddp", "fsdp"):
        wrapped = wrap(mlp(), how, group=PARTY, precision="fp16")
        wrapped.scaler.load_state_dict({**wrapped.scaler.state_dict(), "scale": 1024.0})
        found[how] = train(wrapped, clip=1.0, accumulate=2, steps=16)
        opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        x, y = data()
        before, scale = weights(wrapped), wrapped.scaler.get_scale()
        # Too much for fp16, on one rank only: all skip.
        wrapped.finish()
        loss = mse_loss(wrapped(x), y) * (1e30 if PARTY.rank == 0 else 1.0)
        wrapped.backward(loss)
        update = wrapped.step(opt, accumulate=1)
        unchanged = weights(wrapped) == before
        mse_loss(wrapped(x), y).backward()
        found[how]["overflow"] = [update.done, update.skipped, unchanged, scale / wrapped.scaler.get_scale()]
        found[how]["forgotten"] = refused(lambda wrapped=wrapped, opt=opt: wrapped.step(opt))
    return found


@question
def made_before() -> Any:
    """An optimizer that was created, and has state, before FSDP replaced the parameters."""
    found = {}
    for how in ("ddp", "fsdp"):
        model = mlp()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, y = data()
        torch.manual_seed(3)
        shared = torch.randn(8, 6)
        mse_loss(model(shared), shared[:, :2]).backward()
        opt.step()
        opt.zero_grad()
        whole = [weakref.ref(parameter) for parameter in model.parameters()]
        wrapped = wrap(model, how, group=PARTY)
        for _ in range(4):
            mse_loss(wrapped(x), y).backward()
            wrapped.step(opt)
        found[how] = weights(wrapped)
        found[f"{how} holds the whole"] = any(parameter() is not None for parameter in whole)
    return found


@question
def seeds() -> Any:
    """Each rank has created a different model. The model of rank 0 is used."""
    found = {}
    for how in ("ddp", "fsdp"):
        torch.manual_seed(100 + PARTY.rank)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
        model[1].running_mean.fill_(PARTY.rank)
        wrapped = wrap(model, how, group=PARTY)
        found[how] = [*weights(wrapped), model[1].running_mean.sum().item()]
    return found


@question
def tied() -> Any:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.up, self.middle, self.down = (torch.nn.Linear(6, 6, bias=False) for _ in range(3))
            self.down.weight = self.up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.middle(self.up(x)).tanh())

    found = {}
    for how in ("ddp", "fsdp"):
        wrapped = wrap(Tied(), how, group=PARTY)
        opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        x, _ = data()
        for _ in range(3):
            mse_loss(wrapped(x), x).backward()
            wrapped.step(opt, clip=0.1)
        found[how] = weights(wrapped)
        found[f"{how} is tied"] = wrapped.up.weight is wrapped.down.weight
    return found


class Strided(torch.nn.Module):
    """A parameter that is not contiguous, and a buffer whose elements share memory."""

    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        weight, mask = torch.randn(6, 6).t(), torch.full((1,), 0.5).expand(6)
        self.weight = torch.nn.Parameter(weight.contiguous() if contiguous else weight)
        self.register_buffer("mask", mask.contiguous() if contiguous else mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight * self.mask)[:, :2]


@question
def strided() -> Any:
    return {how: train(wrap(Strided(contiguous=how == "ddp"), how, group=PARTY))["weights"] for how in ("ddp", "fsdp")}


class Average:
    """An average of parameters with a state of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.values[name].copy_(value)


@question
def average() -> Any:
    """The state of an object that holds shards comes back as shards."""
    wrapped = wrap(mlp(), "fsdp", group=PARTY)
    kept = {"model": wrapped, "average": Average(wrapped)}
    held = state.taken(kept)
    shapes = {name: state.Shape(one.dtype, tuple(one.shape)) for name, one in held.tensors.items()}
    targets = state.targets(kept, held.plain, shapes)
    state.restore(kept, held.plain, targets)
    return {name: hasattr(target, "full_tensor") for name, target in targets.items()}


@question
def unshardable() -> Any:
    scalar, mixed = mlp(), torch.nn.ModuleList([mlp().append(torch.nn.Linear(2, 2, dtype=torch.bfloat16))])
    mixed.forward = scalar.forward  # type: ignore[method-assign]
    scalar.temperature = torch.nn.Parameter(torch.tensor(1.0))
    models = {"scalar": scalar, "mixed": mixed}
    found = {name: refused(lambda model=model: wrap(model, "fsdp", group=PARTY)) for name, model in models.items()}
    return found | {"copy": refused(lambda: copy.deepcopy(wrap(mlp(), "fsdp", group=PARTY)))}


@question
def alone() -> Any:
    """Rank 0 evaluates alone; in training, buffers would be broadcast."""
    wrapped = wrap(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)), group=PARTY)
    x, _ = data()
    wrapped(x).sum().backward()
    wrapped.eval()
    if PARTY.rank == 0:
        with torch.no_grad():
            wrapped(x)
    wrapped.train()
    wrapped(x).sum().backward()
    return {"broadcast": wrapped._engine.broadcast_buffers, "training": wrapped.module[1].training}


@question
def evaluated() -> Any:
    """Between two steps of FSDP: the optimizer's parameters are still the model's."""
    wrapped = wrap(mlp(), "fsdp", group=PARTY, precision="bf16")
    own = list(wrapped.parameters())
    x, y = data()
    mse_loss(wrapped(x), y).backward()
    wrapped.step(torch.optim.SGD(own, lr=0.1))
    with torch.no_grad():
        wrapped(x)
    return [now is before for now, before in zip(wrapped.parameters(), own, strict=True)]


@question
def constants() -> Any:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 6)
            self.register_buffer("mask", torch.ones(6), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.mask

    return {"broadcast": wrap(Masked(), group=PARTY)._engine.broadcast_buffers}


@question
def mistakes() -> Any:
    model = mlp()
    wrapped = wrap(model, group=PARTY)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    mse_loss(model(x), y).backward()
    return {
        "direct": refused(lambda: wrapped.step(opt)),
        "foreign": refused(lambda: wrapped.step(torch.optim.SGD(mlp().parameters(), lr=0.1))),
        "sync_batchnorm": refused(lambda: wrap(mlp(), group=PARTY, sync_batchnorm=True)),
        "dp": refused(lambda: wrap(mlp(), "dp", group=PARTY)),
    }


@question
def empty() -> Any:
    """The last batch of an epoch may leave a rank without samples; it still takes part."""
    wrapped = wrap(mlp(), group=PARTY)
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(5)
    x = torch.randn(3, 6)
    part = x[:0] if PARTY.rank else x
    wrapped.weigh(mse_loss(wrapped(part), part[:, :2]), len(part), 3).backward()
    wrapped.step(opt)
    plain = mlp()
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    mse_loss(plain(x), x[:, :2]).backward()
    opt.step()
    return {"ours": weights(wrapped), "plain": weights(plain)}


def main() -> None:
    global KEPT
    found = {function.__name__: function() for function in QUESTIONS}
    # A wrapper, its optimizer and a live graph are held to the very end of the interpreter.
    wrapped = wrap(mlp(), group=PARTY)
    loss = wrapped(data()[0]).sum()
    loss.backward()
    KEPT = [wrapped, wrapped._engine, loss, torch.optim.SGD(wrapped.parameters(), lr=0.1)]
    engine = wrapped._engine
    PARTY.close()
    found["closed"] = [engine.reducer is None, wrapped._engine is wrapped.module, list(wrapped(data()[0]).shape)]
    Path(sys.argv[1], f"{PARTY.rank}.json").write_text(json.dumps(found))


KEPT: list[Any] = []
main()
