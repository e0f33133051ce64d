"""Compares one small value per rank through the store: does each rank train a separate model, or read the same samples?

No rank waits for it: rank 0 looks for the values of the others at a few later steps.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler

from phalanx.train.misuse.samples import IteratedData, differ, fingerprint, has_batch, sampled, shapes
from phalanx.worker.rendezvous.membership import Membership

logger = logging.getLogger(__name__)
COMPARED_AT = 2  # committed steps, after which values are compared
_LOOKS = (2, 3, 4, 8, 16, 64, 256)  # committed steps at which rank 0 looks for the values of the others
_numbers = itertools.count()  # of runs in this process: one group may serve several

NOT_WRAPPED = (
    "the parameters differ between the ranks after {steps} steps, so each rank trains a separate model: "
    "ddp = run.wrap(model), and then ddp(x) in place of model(x)"
)
NOT_DIVIDED = (
    "every rank reads all samples of the DataLoader in run.batches, so {ranks} ranks do the same work: "
    "run.loader(dataset, batch_size={batch}{shuffle}) in place of the DataLoader"
)
NOT_READ_THROUGH = (
    "every rank reads all samples of the DataLoader, so {ranks} ranks do the same work: "
    "data = run.loader(dataset, batch_size={batch}{shuffle}) in place of the DataLoader, and run.batches(data) in the "
    "loop"
)
Found = tuple[str, str]  # a subject and a text


class RankComparison:
    """Compares parameters before and after the first steps, and data sets. `done` when there is nothing more to do."""

    def __init__(self, membership: Membership) -> None:
        self.done = membership.placement.world_size == 1
        self._rank, self._ranks = membership.placement.rank, membership.placement.world_size
        self._store = membership.store
        self._key = f"phalanx/misuse/{next(_numbers)}"
        self._parameters: list[Any] = []  # of the first optimizer
        self._before: list[float] | None = None  # their values before the first step
        self._data: Any = None  # a DataLoader used for training
        self._drawn = 0  # batches until the first commit
        self._shapes: list[tuple[int, ...]] | None = None  # shapes of the first arguments of the model; None: unknown
        self._published = False

    def take_parameters(self, parameters: Sequence[Any]) -> None:
        """Store the parameters of an unwrapped model, before the first step."""
        self._before, self._parameters = sampled(parameters), list(parameters)

    def take_arguments(self, given: Any) -> None:
        """Store the arguments of the first forward of a wrapped model."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self._shapes = [shape for tensor in tensors for shape in shapes(tensor)]

    def take_data(self, data: Any, *, drawn: int = 0) -> None:
        """Store a DataLoader of the script, or the data it reads; `drawn`: number of batches it has drawn."""
        self._data, self._drawn = data, drawn

    def committed(self, step: int) -> list[Found]:
        """Publish or read values, after a committed step. Return the findings."""
        if self.done or (self._before is None and self._data is None):
            self.done = True
            return []
        if step == COMPARED_AT:
            self._publish()
        if self._rank != 0:
            self.done = step >= COMPARED_AT
            return []
        found = self._look() if step in _LOOKS else []
        self.done = self.done or step >= _LOOKS[-1]
        return found

    def close(self) -> list[Found]:
        """Read the values of the other ranks a last time."""
        found = self._look() if not self.done and self._rank == 0 and self._published else []
        self.done = True
        return found

    def _publish(self) -> None:
        after = sampled(self._parameters) if self._before is not None else None
        self._parameters = []
        with _harmless():
            value = {"before": self._before, "after": after, "data": self._described_data()}
            self._store.set(f"{self._key}/{self._rank}", json.dumps(value))
            self._published = True

    def _described_data(self) -> list[int] | None:
        """Return a description that is equal on all ranks that read the same samples. None: the script divides them.

        A script may read all samples on every rank, and pass its model a part of each batch, or every n-th batch: then
        ranks have drawn different numbers of batches at their first commit.
        """
        checksum = fingerprint(self._data)
        if checksum is None:
            return None
        batch = min(self._data.batch_size, len(self._data.dataset))
        if self._shapes is not None and not has_batch(self._shapes, batch, self._ranks):
            return None
        return [checksum, self._drawn]

    def _look(self) -> list[Found]:
        keys = [f"{self._key}/{rank}" for rank in range(self._ranks)]
        found: list[Found] = []
        with _harmless():
            if not self._store.check(keys):
                return found
            self.done = True
            values = [json.loads(self._store.get(key)) for key in keys]
            if differ([value["before"] for value in values], [value["after"] for value in values]):
                found.append(("unwrapped", NOT_WRAPPED.format(steps=COMPARED_AT)))
            data = [value["data"] for value in values]
            if data[0] is not None and all(each == data[0] for each in data):
                shuffle = ", shuffle=True" * isinstance(self._data.sampler, RandomSampler)
                text = NOT_READ_THROUGH if isinstance(self._data, IteratedData) else NOT_DIVIDED
                batch = self._data.batch_size
                found.append(("undivided", text.format(ranks=self._ranks, batch=batch, shuffle=shuffle)))
        return found


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Suppress errors: a check must not end a training, and the store may have ended."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError):
        logger.debug("comparing the ranks", exc_info=True)
