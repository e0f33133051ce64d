"""Extends the timeouts of all process groups during a debug session.

Operations that are already waiting keep their timeout.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from .. import log

LONG = timedelta(days=1)

_saved: dict[int, tuple[Any, timedelta]] = {}  # id -> object, timeout before


def suspend() -> None:
    """Set the timeouts of all groups and stores to a day."""
    for one in _with_timeouts():
        try:
            if _get(one) < LONG:
                _saved[id(one)] = (one, _get(one))
                _set(one, LONG)
        except Exception:  # another version of torch, or a group being destroyed
            log.swallowed("forkserver.debug.group_timeouts")


def resume() -> None:
    """Restore the timeouts, except those that the script has changed since."""
    for one, time in _saved.values():
        try:
            if _get(one) == LONG:
                _set(one, time)
        except Exception:
            log.swallowed("forkserver.debug.group_timeouts")
    _saved.clear()


def _with_timeouts() -> list[Any]:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []
    found: list[Any] = []
    for group, (_, store) in list(c10d._pg_map.items()):
        try:
            found += [store, *(group._get_backend(device) for device in group._device_types)]
        except Exception:
            log.swallowed("forkserver.debug.group_timeouts")
    return list({id(one): one for one in found}.values())


def _get(one: Any) -> timedelta:
    if isinstance(seconds := getattr(one, "timeout_seconds", None), float):  # a group of phalanx
        return timedelta(seconds=seconds)
    found: timedelta = one.options._timeout if hasattr(one, "_set_default_timeout") else one.timeout
    return found


def _set(one: Any, time: timedelta) -> None:
    if hasattr(one, "_set_default_timeout"):
        one._set_default_timeout(time)
    else:
        one.set_timeout(time)
