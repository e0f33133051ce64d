"""How a process group ends: with its run, by itself, or after its connections were cut."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from phalanx.worker import ending
from phalanx.worker.process_group import nccl
from phalanx.worker.rendezvous import tcp_store
from phalanx.worker.rendezvous.membership import Membership

logger = logging.getLogger(__name__)
FAREWELL = 5.0  # seconds for the other ranks to leave, before the store that this process hosts ends with it


class ClosableGroup(ending.OpenGroup, Protocol):
    """A group that this module ends."""

    closed: bool

    def forget_groups(self) -> None:
        """Release the groups of fewer ranks that it has made."""


class GroupClosing:
    """Ends a process group, after what depends on it: runs (`first`), and callbacks that release it (`before`)."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._runs: list[Callable[[bool], object]] = []
        self._callbacks: list[Callable[[], Callable[[], object] | None]] = []

    def first(self, close: Callable[[bool], object]) -> None:
        """Call `close(failed)` before the group ends, and raise its exception at the end. Not if it is abandoned."""
        self._runs.append(close)

    def before(self, callback: Callable[[], object]) -> None:
        """Call `callback()` before the group ends. A bound method does not keep its object alive."""
        if hasattr(callback, "__self__") and hasattr(callback, "__func__"):
            self._callbacks.append(weakref.WeakMethod(callback))
        else:
            self._callbacks.append(lambda: callback)

    def close(self, group: ClosableGroup, *, failed: bool) -> None:
        """Close the runs and end the group. After a failure, do not wait for other ranks."""
        with contextlib.ExitStack() as stack:  # close each of them, even if another one raises
            stack.callback(self._end, group, failed)
            for close in self._runs:
                stack.callback(close, failed)

    def _end(self, group: ClosableGroup, failed: bool) -> None:
        self._release(group)
        if self._membership.owned:
            _destroy(failed)
            _say_farewell(self._membership, failed)

    def abandon(self, group: ClosableGroup) -> None:
        """End a group whose connections are cut, without waiting."""
        self._release(group)
        import torch.distributed as dist

        if dist.is_initialized():
            destroy_without_waiting()

    def _release(self, group: ClosableGroup) -> None:
        """Release everything that holds the group."""
        group.closed = True
        ending.forget(group)
        self._runs.clear()
        callbacks, self._callbacks = self._callbacks, []
        for find in reversed(callbacks):
            if (callback := find()) is not None:
                try:
                    callback()
                except Exception:
                    logger.debug("callback before the group closes", exc_info=True)
        group.forget_groups()
        if callbacks and self._membership.owned:
            # The last holder of a gloo group joins its threads with the GIL held: that must not be a model.
            gc.collect()


def _destroy(failed: bool) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return  # the script has done it itself
    if not failed:
        dist.destroy_process_group()
        return
    ending.keep_groups()
    destroy_without_waiting()


def destroy_without_waiting() -> None:
    """Destroy the groups of this process after a failure. Errors are only logged: another one is the cause."""
    import torch.distributed as dist

    try:
        if "nccl" in str(dist.get_backend_config()):
            nccl.abort()
            nccl.forget_groups()
        else:
            dist.destroy_process_group()
    except Exception:
        logger.debug("destroying the process group after a failure", exc_info=True)


def _say_farewell(membership: Membership, failed: bool) -> None:
    """Keep the store for ranks that are slightly behind, before this process ends and the store with it."""
    if not membership.store_on_a_rank or not (membership.hosts_store or tcp_store.answers(membership.place)):
        return
    store = membership.store.at("farewell")
    with contextlib.suppress(RuntimeError):  # raised by torch when the store has ended
        gone = store.add("gone", 1)
        end = time.monotonic() + (FAREWELL if membership.hosts_store and not failed else 0)
        while gone < membership.placement.world_size and time.monotonic() < end:
            time.sleep(0.005)
            gone = store.add("gone", 0)
