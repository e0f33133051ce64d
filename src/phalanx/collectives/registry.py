"""All groups of this process, so that they can be aborted together, as when a rank has died."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Any

logger = logging.getLogger(__name__)

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def add(group: Any) -> None:
    """Add a group, for as long as it lives."""
    _groups.add(group)


def abort() -> None:
    """Abort all groups: waiting calls, and joins, raise GroupAborted. Thread-safe.

    Calls that wait for connections of the kernel or of gloo are not woken; those connections have to be cut.
    """
    with contextlib.suppress(ImportError):
        from phalanx.collectives import _native

        _native.abort_joining()
    for group in [*_groups]:
        try:
            group.abort()
        except Exception:  # the others have to be aborted all the same
            logger.debug("cannot abort a group", exc_info=True)


def _forked() -> None:
    """Forget the groups in a forked child: they belong to the parent."""
    _groups.clear()


os.register_at_fork(after_in_child=_forked)
