"""Checks what all ranks of a training must have in common: seed, models and data sets.

Ranks that differ train without an error for a while, and then fail far from the cause. So each rank describes what it
has, before the state is restored and at the first step, and the descriptions are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.diagnose import words
from phalanx.errors import JoinError, UsageError
from phalanx.train.data.loader import Loader
from phalanx.train.kept.kept_objects import KeptObjects
from phalanx.worker.process_group.group import WorkerProcessGroup

Description = dict[str, str]  # what is described -> its value on this rank
_SHOWN = 4  # maximum number of differences in a message
_FIXES = {
    "seed": "phalanx.main(train, seed=0), with the same seed on every rank; run.wrap then seeds each rank differently",
    "data": "give every rank the same data set and options: run.loader divides the samples among the ranks",
    "model": "build the same model on every rank",
    "kept": "call run.keep with the same objects on every rank",
}


def describe_model(model: Any, name: str, *, frozen: bool = False) -> Description:
    """Describe the parameters of a model. Parameters whose shape is not that of the whole parameter are omitted.

    `frozen`: also which of them are not trained, which must agree where gradients are summed.
    """
    found = {}
    for path, parameter in model.named_parameters():
        whole = not torch.nn.parameter.is_lazy(parameter) and "FlatParameter" not in type(parameter).__name__
        if whole:
            text = f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
            found[f"model {name} {path}"] = text if parameter.requires_grad or not frozen else f"{text}, frozen"
    return found


def describe_buffers(model: Any) -> Description:
    """Describe the buffers of a model that have a shape."""
    return {
        name: f"{tuple(buffer.shape)} {buffer.dtype}"
        for name, buffer in model.named_buffers()
        if not torch.nn.parameter.is_lazy(buffer)
    }


def describe_loader(loader: Loader, name: str) -> Description:
    """Describe what a loader reads: the samples, their order, and how they are divided."""
    found = {"seed": str(loader.seed), "shuffle": str(loader.shuffle), "batches": _batches(loader)}
    if loader.length is not None:
        found["length"] = f"{loader.length} samples"
    return {f"data {name} {what}": value for what, value in found.items()}


def _batches(loader: Loader) -> str:
    last = {"drop": "the last samples are dropped", "pad": "the last batch is padded"}.get(loader.tail, "all samples")
    return f"{loader.global_batch} samples per step, {last}"


def disagreement(
    descriptions: Sequence[Description], reference: int | None = None
) -> tuple[UsageError, set[int]] | None:
    """Return an error that shows the differences, and the ranks that differ from the rank `reference`; None if all
    agree.

    `reference` None: no rank is known to be right, and the error concerns all of them.
    """
    names = dict.fromkeys(name for description in descriptions for name in description)
    different = [name for name in names if len({description.get(name) for description in descriptions}) > 1]
    if not different:
        return None
    kind = next(kind for kind in _FIXES if any(name.partition(" ")[0] == kind for name in different))
    shown = [name for name in different if name.partition(" ")[0] == kind]
    details = []
    for name in shown[:_SHOWN]:
        by_value: dict[str, list[int]] = {}
        for rank, description in enumerate(descriptions):
            by_value.setdefault(description.get(name, "not there"), []).append(rank)
        has = "; ".join(f"{value} on {words.who(ranks)}" for value, ranks in by_value.items())
        details.append(f"{name.partition(' ')[2] or name}: {has}")
    if len(shown) > _SHOWN:
        details.append(f"and {len(shown) - _SHOWN} more")
    what = {"seed": "seeds", "data": "data", "model": "models", "kept": "kept objects"}[kind]
    error = UsageError(f"the ranks have different {what}", details=details, fix=_FIXES[kind])
    everyone = set(range(len(descriptions)))
    wrong = everyone if reference is None else {r for r in everyone if descriptions[r] != descriptions[reference]}
    return error, wrong


class Agreement:
    """Compares the ranks of one run. All ranks must call the same methods.

    `reference`: returns a rank that was part of the training before this group formed, if there is one. Ranks that
    differ from it are new: only they fail, and the others wait for a group without them.
    """

    def __init__(self, kept: KeptObjects, reference: Callable[[], int | None]) -> None:
        self._kept = kept
        self._reference = reference
        self._compared: set[int] = set()  # data that was compared, by identity
        self.complete = False  # there is nothing more to compare

    def compare_kept(self, group: WorkerProcessGroup) -> None:
        """Compare all arguments of `run.keep`."""
        from phalanx.train.checkpoint.state import unwrapped

        found: Description = {}
        for name, thing in self._kept.objects.items():
            found[f"kept {name}"] = type(unwrapped(thing)).__name__
            if isinstance(thing, Loader):
                found |= describe_loader(thing, name)
                self._compared.add(id(thing))
            elif isinstance(thing, torch.nn.Module):
                found |= describe_model(unwrapped(thing), name)
        self._compare(group, found)

    def compare_model(self, group: WorkerProcessGroup, model: Any) -> frozenset[str]:
        """Compare a model that is about to be wrapped.

        Return the names of the buffers that new ranks do not have, or have in another shape: a forward may have
        registered them on ranks that survive, for example as a cache.
        """
        described = describe_model(model, type(model).__name__, frozen=True)
        found = self._compare(group, described, describe_buffers(model))
        if self._reference() is None:
            return frozenset()
        names = {name for buffers in found for name in buffers}
        return frozenset(name for name in names if len({buffers.get(name) for buffers in found}) > 1)

    def compare_data(self, group: WorkerProcessGroup, data: Any) -> None:
        """Compare the data that the first step has read, if it was not kept."""
        self.complete = True
        known = isinstance(data, Loader) and id(data) not in self._compared
        self._compare(group, describe_loader(data, "loader") if known else {})

    def _compare(
        self, group: WorkerProcessGroup, mine: Description, buffers: Description | None = None
    ) -> list[Description]:
        """Raise if ranks differ. Return the buffers of all ranks, which may differ; []: they are the same."""
        if group.world_size == 1:
            return []
        mine, buffers = {"seed": str(group.seed), **mine}, buffers or {}
        digest = zlib.crc32(repr([sorted(mine.items()), sorted(buffers.items())]).encode())
        if len(set(group.gather(digest, all=True) or ())) <= 1:
            return []
        both = group.gather([mine, buffers], all=True) or []
        found = disagreement([description for description, _ in both], self._reference())
        if found is None:
            return [theirs for _, theirs in both]
        error, wrong = found
        if group.rank in wrong:
            raise error
        raise JoinError(f"{words.who(wrong)} cannot take part: {error.what}", details=error.details)
