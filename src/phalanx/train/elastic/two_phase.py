"""Two-phase commit of an update, for models whose lost shards come from replicas.

Without it, a death while gradients are reduced can leave some ranks with the update of step N and others without, and
no step for which every shard still exists. So:

    prepare   The gradients of this rank are complete. It informs all ranks with a small all_reduce.
    commit    All ranks are prepared. The optimizer steps.

A rank that loses its group in between keeps the gradients. If any rank has committed, every rank was prepared; those
that have not committed do so when the survivors meet (`StateOffer.roll_forward`). If none has, all discard them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.train.data.loader import Loader
from phalanx.train.kept.kept_objects import TrainingProgress
from phalanx.train.kept.kept_values import KeptValues
from phalanx.train.stepping.stepper import Stepper


class TwoPhaseCommit:
    """The prepared update of one rank.

    check    raises if the group was lost: gradients may then be incomplete
    loaders  returns the loaders whose batches the current step has used
    """

    def __init__(
        self,
        device: torch.device,
        check: Callable[[], None],
        *,
        stepper: Stepper,
        counter: TrainingProgress,
        values: KeptValues,
        loaders: Callable[[], Sequence[Loader]],
    ) -> None:
        self.pending: Callable[[], None] | None = None  # commits a step that was prepared when the group was lost
        self._check = check
        self._token: Any = torch.zeros(1, device=device)
        self._stepper = stepper
        self._counter = counter
        self._values = values
        self._loaders = loaders
        stepper.hooks.before_commit = self._prepare

    def close(self) -> None:
        """Prepare no further steps; a pending one remains."""
        self._stepper.hooks.before_commit = None

    def _prepare(self, opt: Any, scheduler: Any) -> None:
        """Return when all ranks have complete gradients."""
        self.pending = None
        self._check()
        self.pending = functools.partial(self._commit_late, opt, scheduler, self._loaders())
        dist.all_reduce(self._token)
        self._check()
        self.pending = None

    def _commit_late(self, opt: Any, scheduler: Any, loaders: Sequence[Loader]) -> None:
        """Commit the prepared step after its group was lost: other ranks have committed it."""
        self._stepper.apply(opt, scheduler)
        for loader in loaders:
            loader.commit()
        self._values.commit()
        self._counter.steps += 1
        self._stepper.torn = False
