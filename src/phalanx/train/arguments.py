"""Checks the arguments that a script passes to `Run`. The messages say what was passed, and what to type."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.errors import UsageError
from phalanx.train.data.loader import Loader
from phalanx.worker.process_group.group import WorkerProcessGroup


def kind(value: object) -> str:
    """Return a description of the value's type, for a message."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    name = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def check_group(group: object) -> None:
    """Raise unless this is a process group of phalanx."""
    if not isinstance(group, WorkerProcessGroup):
        raise UsageError(f"Run() was given {kind(group)}, expected a process group", fix="phalanx.Run(phalanx.init())")


def check_model(model: object) -> None:
    """Raise unless this is a model."""
    if not isinstance(model, torch.nn.Module):
        fix = f"run.wrap({model.__name__}())" if isinstance(model, type) else "run.wrap(model)"
        raise UsageError(f"wrap() was given {kind(model)}, expected a torch.nn.Module", fix=fix)


def check_dataset(dataset: object) -> None:
    """Raise unless `run.loader` can read this, as far as its type tells."""
    if isinstance(dataset, Loader):
        raise UsageError("loader() was given a loader of run.loader", fix="use it as it is: run.batches(loader)")
    if isinstance(dataset, type):
        fix = f"run.loader({dataset.__name__}(…), batch_size=64)"
    elif isinstance(dataset, Mapping) and 0 not in dataset:  # such as a DatasetDict
        fix = f"run.loader(data[{next(iter(dataset), 'train')!r}], batch_size=64)"
    elif isinstance(dataset, str | bytes | int | float | torch.nn.Module | None):
        fix = "run.loader(dataset, batch_size=64)"
    else:
        return
    raise UsageError(f"loader() was given {kind(dataset)}, expected a data set or a DataLoader", fix=fix)


def check_batches(data: object) -> None:
    """Raise unless `run.batches` can read this."""
    if isinstance(data, type) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise UsageError(
            f"batches() was given {kind(data)}, expected a loader",
            fix="data = run.loader(dataset, batch_size=64), and then run.batches(data)",
        )


def check_loss(loss: object) -> None:
    """Raise unless this is a loss with gradients."""
    if not isinstance(loss, torch.Tensor):
        details = ["a number has no gradients: loss.item(), float(loss) and loss.numpy() lose them"]
        raise UsageError(
            f"backward() was given {kind(loss)}, expected the tensor that the loss function returned",
            details=details,
            fix="run.backward(loss)",
        )
    if not loss.requires_grad:
        raise UsageError(
            "backward() was given a tensor without gradients",
            details=[
                "it was computed under torch.no_grad(), or detached, or no parameter that is trained is part of it"
            ],
            fix="loss = loss_fn(ddp(x), y), outside of torch.no_grad()",
        )


def check_epochs(count: Any) -> int:
    """Return the number of epochs, or raise."""
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"epochs() was given {count!r}, expected a number of epochs", fix="run.epochs(10)")
    return number


def check_step(opt: Any, clip: object, scheduler: object) -> None:
    """Raise unless `run.step` can use these arguments."""
    if not hasattr(opt, "param_groups"):
        given = "loss" if isinstance(opt, torch.Tensor | float) else "metrics"
        raise UsageError(
            f"step() was given {kind(opt)}, expected an optimizer",
            fix=f"run.step(optimizer, {given}={given})" if given == "loss" else "run.step(optimizer, loss=loss)",
        )
    if isinstance(opt, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls the model several times for one update, and step() updates from the gradients that there are",
            fix="torch.optim.AdamW(model.parameters()), or opt.step(closure) in a script without phalanx.main",
        )
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or clip <= 0):
        raise UsageError(f"clip={clip!r}: expected the largest norm of the gradient", fix="clip=1.0")
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise UsageError(
            f"scheduler is {kind(scheduler)}, expected a learning rate scheduler", fix="scheduler=scheduler"
        )


def check_metrics(values: object, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `run.log` as one dict."""
    if values is None:
        return metrics
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(
            f"log() was given {kind(values)}, expected metrics by name",
            fix='run.log(accuracy=accuracy), or run.log({"val/accuracy": accuracy}), or run.print("text")',
        )
    return {**values, **metrics}
