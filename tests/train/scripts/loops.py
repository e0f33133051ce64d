"""Training loops through `Run` on several ranks, one function per question. Every rank writes its observations as JSON.

phalanx run -g 2 loops.py FOLDER
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from party import mlp
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Subset, TensorDataset

import phalanx
from phalanx.errors import UsageError

FOLDER = Path(sys.argv[1])
HERE = phalanx.init()  # the group; every question creates its own Run in it
QUESTIONS: list[Callable[[], Any]] = []

torch.set_num_threads(1)
torch.manual_seed(2)
X = torch.randn(81, 6)
Y = torch.stack([X.sum(1), X.prod(1)], 1)
DATA = TensorDataset(X, Y)
EVEN = TensorDataset(X[:80], Y[:80])


def question(function: Callable[[], Any]) -> Callable[[], Any]:
    QUESTIONS.append(function)
    return function


def weights(*models: torch.nn.Module) -> list[float]:
    found = [value for model in models for value in model.parameters()]
    return [getattr(value, "full_tensor", lambda v=value: v)().abs().sum().item() for value in found]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(updates: list[list[slice]], clip: float | None = None) -> list[float]:
    """One process with plain PyTorch: each update is the mean over all of its samples."""
    model = mlp()
    opt = sgd(model)
    for update in updates:
        x, y = (torch.cat([data[part] for part in update]) for data in (X, Y))
        mse_loss(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return weights(model)


def parts(size: int, end: int = len(X)) -> list[slice]:
    return [slice(start, min(start + size, end)) for start in range(0, end, size)]


@question
def padded() -> Any:
    """81 samples in steps of 16: the last has 1, so rank 0 has 7 samples of padding and the other rank only padding."""
    found: dict[str, Any] = {"plain": plain([[part] for part in parts(16)] * 2)}
    for name in ("each", "mean"):
        with phalanx.Run(phalanx.init()) as run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net = run.wrap(mlp())
            opt = sgd(net)
            data = run.loader(DATA, global_batch=16, pad_last=True)
            for _ in run.epochs(2):
                for x, y in run.batches(data):
                    losses = mse_loss(net(x), y, reduction="none").mean(1)
                    run.backward(losses if name == "each" else losses.mean())
                    run.step(opt)
            found[name] = weights(net)
            found[f"{name} warnings"] = [str(warning.message) for warning in caught]
    return found


@question
def windows() -> Any:
    """11 batches per epoch, of which the last is small, in windows of 4; with an evaluation in the middle of one."""
    batches = parts(8)
    epoch = [batches[:4], batches[4:8], batches[8:]]
    found: dict[str, Any] = {"plain": plain(epoch * 2, clip=0.5)}
    for how in ("ddp", "fsdp"):
        with phalanx.Run(phalanx.init()) as run:
            net = run.wrap(mlp(), how, accumulate=4)
            opt = sgd(net)
            data = run.loader(DATA, global_batch=8, drop_last=False)
            test = run.loader(DATA, global_batch=30, drop_last=False)
            done, seen, positions = [], [], []
            for _ in run.epochs(2):
                for number, (x, y) in enumerate(run.batches(data)):
                    if number == 10:
                        seen.append(evaluated(run, net, test))
                    loss = mse_loss(net(x), y)
                    run.backward(loss)
                    if number == 5:
                        seen.append(evaluated(run, net, test))
                    done.append(run.step(opt, clip=0.5, loss=loss).done)
                    positions.append(data.position.consumed)
            found[how] = {
                "weights": weights(net),
                "updates": [number for number, update in enumerate(done) if update],
                "positions": positions[:11],
                "seen": seen,
                "steps": run.steps,
            }
    return found


@torch.no_grad()
def evaluated(run: phalanx.Run, net: Any, test: Any) -> int:
    """Return the samples, each once; some may have been given to a rank only so that it takes part."""
    net.eval()
    counted = 0
    for x, _ in run.batches(test):
        counted += len(net(x)[: test.last_count])
    net.train()
    return int(run.group.sum(counted))


@question
def foreign() -> Any:
    """A script that wraps its model itself, and lets `run.backward` weight the loss."""
    with phalanx.Run(phalanx.init()) as run:
        ddp = torch.nn.parallel.DistributedDataParallel(mlp())
        opt = sgd(ddp)
        for x, y in run.batches(run.loader(DATA, global_batch=16, weights=[3, 1], drop_last=False)):
            run.backward(mse_loss(ddp(x), y))
            run.step(opt)
        found = {"plain": plain([[part] for part in parts(16)]), "ours": weights(ddp)}
        ddp.reducer = ddp.logger = None
    return found


@question
def kept() -> Any:
    """With any order of wrapping, keeping and creating optimizers: stopped and resumed."""
    found = {}
    for how in ("ddp", "fsdp"):
        for order in ("opt keep wrap", "opt wrap keep", "wrap opt keep", "wrapped"):
            name = f"{how}, {order}"
            folder = str(FOLDER / name.replace(", ", "-").replace(" ", "-"))
            runs = [resumable(how, order, folder, stop) for stop in (8, None)]
            found[name] = [run[0] for run in runs], runs[-1][1]
        found[how] = resumable(how, "opt wrap keep", None, None)[1]
    return found


def resumable(how: str, order: str, folder: str | None, stop: int | None) -> tuple[int, list[float]]:
    """5 batches an epoch, in windows of 2. Stopped in the middle of one, with a checkpoint there."""
    with phalanx.Run(phalanx.init()) as run:
        model = mlp()
        data = run.loader(DATA, global_batch=16, shuffle=True)
        net: Any = None
        opt = None if order.startswith("wrap") else torch.optim.AdamW(model.parameters(), lr=0.01)
        for word in order.split():
            if word in ("wrap", "wrapped"):
                net = run.wrap(model, how, accumulate=2)
            if opt is None and word in ("opt", "wrapped"):
                opt = torch.optim.AdamW(net.parameters(), lr=0.01)
            if word in ("keep", "wrapped"):
                run.checkpoints(folder)
                run.keep(model=net if word == "wrapped" else model, opt=opt, data=data)
        began = run.steps
        taken = 0
        for _ in run.epochs(3):
            for x, y in run.batches(data):
                taken += 1
                run.backward(mse_loss(net(x), y))
                run.step(opt)
                if taken == stop:
                    run.checkpoint()
                    return began, weights(net)
        return began, weights(net)


@question
def rivals() -> Any:
    """Two models and two optimizers, one of which accumulates."""
    found: dict[str, Any] = {"plain": plain_rivals()}
    for how in ("ddp", "fsdp"):
        with phalanx.Run(phalanx.init()) as run:
            first, second, opt_first, opt_second = pair()
            maker, judge = run.wrap(first, how, accumulate=2), run.wrap(second, how)
            steps = []
            for part in parts(16, 64):
                x = X[part].tensor_split(run.world_size)[run.rank]
                opt_second.zero_grad()
                loss = judge(x).square().mean() - judge(maker(x).detach()).square().mean()
                run.backward(loss)
                run.step(opt_second, commit=False, judge=loss)
                loss = judge(maker(x)).square().mean()
                run.backward(loss)
                run.step(opt_first, clip=0.1, maker=loss)
                steps.append(run.steps)
            found[how] = weights(first, second)
            found[f"{how} steps"] = steps
    return found


def plain_rivals() -> list[float]:
    first, second, opt_first, opt_second = pair()
    for number, part in enumerate(parts(16, 64)):
        x = X[part]
        opt_second.zero_grad()  # gradients of the other's backward
        (second(x).square().mean() - second(first(x).detach()).square().mean()).backward()
        opt_second.step()
        (second(first(x)).square().mean() / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(first.parameters(), 0.1)
            opt_first.step()
            opt_first.zero_grad()
    return weights(first, second)


def pair() -> tuple[Any, ...]:
    torch.manual_seed(4)
    first, second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
    return first, second, sgd(first), sgd(second)


class Counting(IterableDataset):
    def __iter__(self) -> Any:
        return iter(X[HERE.rank : 80 : HERE.world_size].split(4))


class Mine(torch.utils.data.Dataset):
    """A data set that uses its rank when it is read."""

    def __len__(self) -> int:
        return len(X) // HERE.world_size

    def __getitem__(self, index: int) -> Any:
        return DATA[index * HERE.world_size + torch.distributed.get_rank()]


def looped(data: Any, wrap: str = "run", how: str = "run", *, direct: bool = False) -> list[str]:
    """Return the warnings of a training with `data`. `direct`: its loop does not use `run.batches`."""
    with warnings.catch_warnings(record=True) as caught, phalanx.Run(phalanx.init()) as run:
        warnings.simplefilter("always")  # until the run is closed, which may give the last one
        model = mlp()
        model[0].weight.requires_grad_(how != "frozen")
        if wrap == "fsdp":
            torch.distributed.fsdp.fully_shard(model)
        net = {"run": run.wrap, "torch": torch.nn.parallel.DistributedDataParallel}.get(wrap, lambda model: model)(
            model
        )
        opt = sgd(net)
        if callable(data):
            data = data(run)
        for number, batch in enumerate(data if direct else run.batches(data)):
            x = batch[0] if isinstance(batch, list | tuple) else batch
            if how == "evaluate" or (how == "every other batch" and number % run.world_size != run.rank):
                continue
            if how == "part of the batch":
                x = x[run.rank :: run.world_size]
            loss = net(x).square().mean()
            if how != "no backward":
                run.backward(loss)
            if how == "opt.step":
                opt.step()
                opt.zero_grad()
            else:
                run.step(opt, accumulate=3 if how == "accumulate" else None)
        run.group.barrier()  # all ranks have published their values, before rank 0 reads them a last time
        if wrap == "torch":
            net.reducer = net.logger = None
    return [str(warning.message) for warning in caught]


@question
def misused() -> Any:
    """Mistakes, and correct code that looks like one."""
    ours = lambda run: run.loader(DATA, batch_size=4, shuffle=True)  # noqa: E731
    half = X[:80].chunk(2)[HERE.rank]
    return {
        "unwrapped": looped(ours, wrap="no"),
        "undivided": looped(DataLoader(DATA, batch_size=4, shuffle=True)),
        "undivided, in order, with workers": looped(DataLoader(DATA, batch_size=4, num_workers=1)),
        "undivided, without run.batches": looped(DataLoader(DATA, batch_size=4, shuffle=True), direct=True),
        "undivided, without run.batches, with workers": looped(
            DataLoader(DATA, batch_size=4, num_workers=1), direct=True
        ),
        "no backward": looped(ours, how="no backward"),
        "opt.step": looped(ours, how="opt.step"),
        "right": [
            *looped(ours),
            *looped(ours, how="accumulate"),
            *looped(ours, how="frozen"),
            *looped(ours, wrap="torch"),
            *looped(ours, wrap="fsdp"),
            *looped(ours, how="evaluate", wrap="no"),
            *looped(DataLoader(DATA, batch_size=4), how="evaluate"),
            *looped(DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA))),
            *looped(DataLoader(TensorDataset(half), batch_size=4, shuffle=True)),
            *looped(DataLoader(Subset(DATA, range(HERE.rank, 80, 2)), batch_size=4, shuffle=True)),
            *looped(DataLoader(Mine(), batch_size=4)),
            *looped(DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True))),
            *looped(ours, direct=True),
            *looped(DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA)), direct=True),
            *looped(DataLoader(Subset(DATA, range(HERE.rank, 80, 2)), batch_size=4), direct=True),
            *looped(DataLoader(Mine(), batch_size=4), direct=True),
            *looped(X[HERE.rank : 80 : 2].split(4), direct=True),
            *looped(DataLoader(Counting(), batch_size=None)),
            *looped(DataLoader(EVEN, batch_size=8), how="part of the batch", direct=True),
            *looped(DataLoader(EVEN, batch_size=8, num_workers=1), how="part of the batch"),
            *looped(DataLoader(EVEN, batch_size=8), how="every other batch", direct=True),
            *looped(DataLoader(EVEN, batch_size=8), how="every other batch"),
        ],
    }


@question
def different() -> Any:
    """What ranks should have in common, and do not: rejected before the first update."""

    def refusal(*, seed: int = 0, width: int = 6, samples: int = 80, batch: int = 4, keep: bool = False) -> str:
        with phalanx.Run(phalanx.init(seed=seed)) as run:
            model = torch.nn.Linear(width, 2)
            opt = sgd(model)
            data = run.loader(TensorDataset(X[:samples], Y[:samples]), batch_size=batch, shuffle=True)
            try:
                if keep:
                    run.keep(model, opt, data)
                net = run.wrap(model)
                for x, y in run.batches(data):
                    run.backward(mse_loss(net(x[:, :width]), y))
                    run.step(opt)
            except UsageError as error:
                return f"{run.steps} steps\n{error}"
        return "no error"

    last = HERE.rank
    return {
        "seed": refusal(seed=last),
        "model": refusal(width=6 - last),
        "kept model": refusal(width=6 - last, keep=True),
        "data": refusal(samples=80 - 8 * last),
        "kept data": refusal(samples=80 - 8 * last, keep=True),
        "batch": refusal(batch=4 + last),
        "nothing": refusal(keep=True),
    }


def main() -> None:
    found = {function.__name__: function() for function in QUESTIONS}
    Path(FOLDER, f"{HERE.rank}.json").write_text(json.dumps(found))
    HERE.close()


main()
