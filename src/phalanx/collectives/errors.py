"""Errors of collectives. All of them are torch's DistBackendError."""

from __future__ import annotations

import torch.distributed as dist


class PeerLost(dist.DistBackendError):  # type: ignore[misc]
    """A rank has exited or left the group."""


class CollectiveTimeout(dist.DistBackendError):  # type: ignore[misc]
    """A rank did not arrive in time."""


class CollectiveMismatch(dist.DistBackendError):  # type: ignore[misc]
    """Ranks made different calls."""


class LeftEarly(CollectiveMismatch):
    """This rank has ended its training, and other ranks have not."""


class GroupAborted(dist.DistBackendError):  # type: ignore[misc]
    """The group was aborted or closed during a call."""


class CallRefused(dist.DistBackendError):  # type: ignore[misc]
    """The backend does not support this call. Raised before any data is moved."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}\n  fix: {fix}" if fix else what)
