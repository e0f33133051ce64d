"""What goes wrong between ranks. Whoever catches torch's errors catches these."""

from __future__ import annotations

import torch.distributed as dist


class PeerLost(dist.DistBackendError):  # type: ignore[misc]
    """A rank has ended, or left the group, and others wait for it."""


class CollectiveTimeout(dist.DistBackendError):  # type: ignore[misc]
    """A rank has not come in time."""


class CollectiveMismatch(dist.DistBackendError):  # type: ignore[misc]
    """Ranks called different things."""


class GroupAborted(dist.DistBackendError):  # type: ignore[misc]
    """The group was ended while somebody waited in it."""


class CallRefused(dist.DistBackendError):  # type: ignore[misc]
    """What these groups do not do: said before anything is moved."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}\n  fix: {fix}" if fix else what)
