"""The options of a loader: which are accepted, their defaults, and the messages for those that are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from phalanx.errors import UsageError
from phalanx.train.data.order import Tail


def global_batch_of(batch_size: int | None, global_batch: int | None, world_size: int) -> int:
    """Return the samples of all ranks in a full step; raise UsageError if the batch size is missing or wrong."""
    given = {"batch_size": batch_size, "global_batch": global_batch}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1 or not all(type(value) is int and value > 0 for value in given.values()):
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UsageError(
            f"the batch size is missing or wrong: {listed or 'neither batch_size nor global_batch'} was given",
            fix="batch_size=… (samples of one rank) or global_batch=… (of all ranks together)",
        )
    return global_batch or (batch_size or 0) * world_size


def choose_tail(train: bool | None, shuffle: bool, drop_last: bool | None, pad_last: bool) -> Tail:
    """Return what happens to the last samples; raise UsageError for options that contradict each other."""
    for name, value, types in (
        ("train", train, (bool, type(None))),
        ("shuffle", shuffle, bool),
        ("drop_last", drop_last, (bool, type(None))),
        ("pad_last", pad_last, bool),
    ):
        if not isinstance(value, types):
            raise UsageError(
                f"{name}={value!r} is a {type(value).__name__}, expected True or False", fix=f"{name}=True"
            )
    asked = {"shuffle": shuffle, "drop_last": drop_last, "pad_last": pad_last}
    if train is False and any(asked.values()):
        listed = ", ".join(f"{name}=True" for name, value in asked.items() if value)
        raise UsageError(
            f"train=False with {listed}: an evaluation reads every sample exactly once, in order",
            fix=f"leave out {listed}, or train=False",
        )
    if drop_last and pad_last:
        raise UsageError(
            "drop_last=True and pad_last=True: the last samples are dropped or padded, not both",
            fix="give one of the two",
        )
    if train is False:
        return "every"
    if pad_last:
        return "pad"
    drops = shuffle or train is True if drop_last is None else drop_last
    return "drop" if drops else "uneven"


def check_number(name: str, value: Any) -> None:
    """Raise UsageError if `value` is not a whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise UsageError(f"{name}={value!r}: expected a whole number, 0 or more", fix=f"{name}=4")


def refuse_samplers(**samplers: Any) -> None:
    """Raise UsageError for samplers."""
    ours = [name for name, value in samplers.items() if value is not None]
    if ours:
        raise UsageError(
            f"{', '.join(ours)}: this loader chooses the samples of each rank itself",
            details=["a sampler that weights or filters samples can be a data set: torch.utils.data.Subset"],
            fix="leave it out, and use shuffle=…, weights=…, drop_last=…",
        )


def options_of(loader: DataLoader[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which `run.loader` reads the data set of a DataLoader in the same way.

    `given`: all options of `run.loader`. The batch size of the DataLoader applies to each rank, if they have none. An
    option that the DataLoader also has must be omitted.
    """
    sampler, iterable = loader.sampler, is_iterable(loader.dataset)
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    whole = iterable or isinstance(sampler, SequentialSampler) or (shuffles and len(sampler) == len(loader.dataset))
    if loader.batch_size is None:
        raise UsageError(
            "the DataLoader has no batch_size: run.loader forms the batches itself, from single samples",
            fix="run.loader(dataset, batch_size=…), with the data set of the DataLoader",
        )
    if not whole:
        raise UsageError(
            f"the DataLoader has a {name_of(sampler)}: run.loader chooses the samples of each rank itself",
            details=["a sampler that weights or filters samples can be a data set: torch.utils.data.Subset"],
            fix=f"DataLoader(dataset, batch_size={loader.batch_size}, shuffle=True), without a sampler",
        )
    own = {
        "shuffle": shuffles,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "pin_memory": loader.pin_memory or None,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    twice = [f"{name}={given[name]!r}" for name in own if given[name] not in (None, False, 0)]
    if twice:
        raise UsageError(
            f"run.loader was given a DataLoader and {', '.join(twice)}, which the DataLoader decides",
            fix=f"DataLoader(dataset, {', '.join(twice)}, …)",
        )
    if given["batch_size"] is None and given["global_batch"] is None:
        own["batch_size"] = loader.batch_size
    return {**given, **own}


def is_iterable(dataset: Any) -> bool:
    """Return whether the data set is read by iterating, not by index; raise UsageError if it is not a data set."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                f"{name_of(dataset)} is not a data set", fix="pass one with __getitem__ and __len__, or with __iter__"
            )
        if hasattr(dataset, "__next__"):
            raise UsageError(
                f"{name_of(dataset)} can be read only once, but every epoch reads it",
                fix="pass an object whose __iter__ starts again, such as a torch.utils.data.IterableDataset",
            )
        return True
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"{name_of(dataset)} has an index but no length", fix="give it a __len__, or make it iterable")
    return False


def name_of(dataset: Any) -> str:
    """Return the name of the data set's class, for messages."""
    return type(dataset).__name__


def pins(device: Any) -> bool:
    """Return whether batches for this device are put into pinned memory. None: the device is unknown."""
    return bool(torch.cuda.is_available()) if device is None else str(device).startswith("cuda")
