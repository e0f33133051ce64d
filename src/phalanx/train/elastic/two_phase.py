"""Two-phase commit of an update, for models whose lost shards come from replicas.

Without it, a death while gradients are reduced can leave some ranks with the update of step N and others without, and
no step of which every shard is left. So:

prepare   The gradients of this rank are complete. It tells all ranks with a small all_reduce.
commit    All ranks are prepared. The optimizer steps.

A rank that loses its group in between keeps the gradients. If any rank has committed, every rank was prepared; those
that have not committed do so when the survivors meet (`StateOffer.roll_forward`). If none has, all discard them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class TwoPhaseCommit:
    """The prepared update of one rank.

    two_phase = TwoPhaseCommit(device, check)    # check() raises if the group was lost
    two_phase.prepare(commit)                    # returns when all ranks are prepared
    two_phase.pending                            # after an exception: `commit`, if this rank was prepared
    """

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self.pending: Callable[[], None] | None = None
        self._check = check
        self._token: Any = torch.zeros(1, device=device)

    def prepare(self, commit: Callable[[], None]) -> None:
        """Return when all ranks have complete gradients; `commit` makes the update of this rank later, if they do not
        get that far together."""
        self.pending = None
        self._check()
        self.pending = commit
        dist.all_reduce(self._token)
        self._check()
        self.pending = None
