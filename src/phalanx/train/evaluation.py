"""`run.evaluate`: the means of what a script measures, over every sample of all ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx.errors import UsageError
from phalanx.train.data.loader import Loader

_FIX = 'return {"loss": loss, "accuracy": output.argmax(1) == y}'


class MeanOverSamples:
    """Adds up measured values. Tensors stay on their device until the end, so that no batch waits for a GPU."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, int] = {}  # samples per name

    def add(self, measured: object, count: int, size: int) -> None:
        """Add the values of a batch of `size` samples, of which the first `count` are not padding."""
        if not isinstance(measured, Mapping):
            raise UsageError(
                f"measure() returned a {type(measured).__name__}, expected a dict of names and values", fix=_FIX
            )
        self.samples += count
        for name, value in measured.items():
            if name == "samples":
                raise UsageError("measure() returned 'samples', which evaluate() counts itself", fix="leave it out")
            if count:
                self._sums[name] = self._sums.get(name, 0.0) + _sum(name, value, count, size)
                self._weights[name] = self._weights.get(name, 0) + count

    def totals(self) -> dict[str, Any]:
        """Return the totals of this rank, as plain values."""
        return {"samples": self.samples, "sums": {n: float(s) for n, s in self._sums.items()}, "weights": self._weights}


def merge(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over all samples of all ranks, and the number of samples."""
    means: dict[str, Any] = {"samples": sum(one["samples"] for one in totals)}
    for name in dict.fromkeys(name for one in totals for name in one["sums"]):
        weight = sum(one["weights"].get(name, 0) for one in totals)
        means[name] = math.fsum(one["sums"].get(name, 0.0) for one in totals) / weight
    return means


def check(data: object, measure: object, *, kept: bool) -> Loader:
    """Return `data`, if it is a loader that can be evaluated; raise UsageError otherwise."""
    fix = "test = run.loader(test_set, batch_size=64, train=False), and then run.evaluate(test, measure)"
    if not isinstance(data, Loader):
        raise UsageError(f"evaluate() was given a {type(data).__name__}, expected a loader of run.loader", fix=fix)
    if not callable(measure):
        raise UsageError(
            f"evaluate() was given a {type(measure).__name__} to measure with, expected a function of a batch",
            fix="run.evaluate(test, measure), with def measure(x, y): " + _FIX,
        )
    if kept or data.position.consumed:
        raise UsageError("evaluate() was given a loader of the training: it may be in the middle of an epoch", fix=fix)
    if data.tail == "drop":
        raise UsageError("evaluate() was given a loader that drops its last samples", fix=fix)
    return data


def measure_batch(measure: Callable[..., object], batch: Any) -> object:
    """Call `measure(x, y)` for a batch of several parts, `measure(batch)` for a single tensor or a dict."""
    return measure(*batch) if isinstance(batch, list | tuple) else measure(batch)


@contextlib.contextmanager
def evaluating(models: Iterable[Any]) -> Iterator[None]:
    """Set models to evaluation mode, without gradients; at the end, restore the mode of each of their modules."""
    before = [(model, model.training) for model in models]
    modes = [(part, part.training) for model, _ in before for part in (model, *model.modules())]
    for model, _ in before:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for model, training in before:
            model.train(training)  # the engine of a wrapped model, too
        for part, training in modes:
            part.training = training


def _sum(name: object, value: Any, count: int, size: int) -> Any:
    """Return the sum of `value` over the samples: it is the mean of the batch, or one value per sample."""
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == size and (size > 1 or value.numel() > 1):
        each = value[:count].detach()
        return (each if each.dim() == 1 else each.flatten(1).double().mean(1)).sum(dtype=torch.float64)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"measure() returned {name!r} of shape {list(value.shape)}, for a batch of {size}",
                details=["expected the mean of the batch, or one value per sample"],
                fix=_FIX,
            )
        value = value.detach().reshape(()).double()
    elif not isinstance(value, int | float):
        raise UsageError(
            f"measure() returned {name!r} of type {type(value).__name__}, expected a number or a tensor", fix=_FIX
        )
    if count < size:
        raise UsageError(
            f"measure() returned one number for {name!r}, and {size - count} of the batch's {size} samples are padding",
            fix="return one value per sample, or run.loader(…, train=False)",
        )
    return value * count
