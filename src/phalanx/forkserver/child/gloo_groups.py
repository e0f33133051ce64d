"""Keeps destroyed gloo process groups alive for a while, because torch may deadlock if it frees one at once.

torch's destructor of a gloo group waits for the group's threads while it holds the GIL. A thread that has just
finished a collective may need the GIL to release Python objects: both wait forever. The last reference is often that
of a DDP wrapper, dropped when a function returns right after `destroy_process_group()`, or the interpreter's at
exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections import deque
from typing import Any

_SETTLED = 10.0  # seconds after which no thread of a group holds anything to release
_MAX_KEPT = 16  # destroyed groups that are kept longer than that

_kept: deque[tuple[float, Any]] = deque()


class KeptGroups(dict[Any, Any]):
    """Replaces torch's table of groups (`_pg_map`), and keeps the groups that are removed from it."""

    def __delitem__(self, group: Any) -> None:
        _keep(group)
        super().__delitem__(group)

    def clear(self) -> None:
        """Remove all groups, and keep them."""
        for group in self:
            _keep(group)
        super().clear()


def install() -> None:
    """Install the table once torch.distributed is imported. Repeated calls are cheap."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    known = getattr(c10d, "_pg_map", None)
    if type(known) is dict:
        c10d._pg_map = KeptGroups(known)


def keep_all() -> None:
    """At exit, keep all gloo groups: the kernel ends their threads with the process."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for group in list(getattr(c10d, "_pg_map", ())):
        _keep(group)
    for _, backend in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _keep(group: Any) -> None:
    now = time.monotonic()
    while len(_kept) > _MAX_KEPT and now - _kept[0][0] > _SETTLED:
        _kept.popleft()
    with contextlib.suppress(RuntimeError, AttributeError):  # no devices, or a torch without backends per device
        _kept.extend((now, backend) for backend in _gloo(group))


def _gloo(group: Any) -> list[Any]:
    """Return the backends of a group that have gloo threads. NCCL's are left to torch, which ends them in order."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in backends if type(backend).__name__ in ("ProcessGroupGloo", "_ProcessGroupWrapper")]
