"""Gloo process groups stay alive for a while after their end, because torch may deadlock when it destroys one at once.

torch's destructor of a gloo group waits for the group's threads while it holds Python's lock. A thread that has just
finished a collective may need that lock to drop what belongs to Python: both wait for ever. The last reference is often
a DDP wrapper's, dropped when a function returns right after `destroy_process_group()`, or the interpreter's at exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections import deque
from typing import Any

_SETTLED = 10.0  # seconds after which no thread of a group has anything left to drop
_MOST = 16  # ended groups that are kept longer than that

_ended: deque[tuple[float, Any]] = deque()


class Groups(dict[Any, Any]):
    """What torch knows its groups by (`_pg_map`): a group that leaves it is kept."""

    def __delitem__(self, group: Any) -> None:
        _keep(group)
        super().__delitem__(group)

    def clear(self) -> None:
        for group in self:
            _keep(group)
        super().clear()


def watch() -> None:
    """As soon as torch.distributed is imported; again at no cost."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    known = getattr(c10d, "_pg_map", None)
    if type(known) is dict:
        c10d._pg_map = Groups(known)


def leave() -> None:
    """At exit: nothing that is left of gloo is destroyed any more. The kernel ends its threads with the process."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for group in list(getattr(c10d, "_pg_map", ())):
        _keep(group)
    for _, backend in _ended:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _keep(group: Any) -> None:
    now = time.monotonic()
    while len(_ended) > _MOST and now - _ended[0][0] > _SETTLED:
        _ended.popleft()
    with contextlib.suppress(Exception):  # a group without devices, or of a torch that has no backends by device
        _ended.extend((now, backend) for backend in _gloo(group))


def _gloo(group: Any) -> list[Any]:
    """The backends of a group that have gloo's threads. NCCL's are left to torch, which ends them in order."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in backends if type(backend).__name__ in ("ProcessGroupGloo", "_ProcessGroupWrapper")]
