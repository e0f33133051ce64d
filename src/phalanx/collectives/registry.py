"""All groups of this process, so that they can be aborted together, for example when a rank has died."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Any

logger = logging.getLogger(__name__)

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def add(group: Any) -> None:
    """Add a group. It is removed when it is freed."""
    _groups.add(group)


def abort() -> None:
    """Abort all groups: waiting calls, and joins, raise GroupAborted. Thread-safe.

    Calls that wait for connections of the kernel or of gloo are not woken; those connections must be closed.
    """
    with contextlib.suppress(ImportError):
        from phalanx.collectives import _native

        _native.abort_joining()
    for group in [*_groups]:
        try:
            group.abort()
        except Exception:  # the others must still be aborted
            logger.debug("cannot abort a group", exc_info=True)


def _forked() -> None:
    """Drop the groups in a forked child: they belong to the parent."""
    _groups.clear()


os.register_at_fork(after_in_child=_forked)
