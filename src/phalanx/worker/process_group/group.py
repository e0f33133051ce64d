"""The process group of a run, as one rank sees it: who it is, and what all ranks do together.

group = WorkerProcessGroup.join()
group.print(f"{group.world_size} ranks")
loss = group.mean(loss)
group.close()                     # optional: it closes with the process
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from phalanx.errors import JoinError, UsageError
from phalanx.forkserver.signed_store import SignedStore
from phalanx.worker.process_group import ending, nccl, seeds
from phalanx.worker.process_group.member import GroupMember
from phalanx.worker.process_group.values import Number, ValueExchange
from phalanx.worker.rendezvous import roll_call, tcp_store
from phalanx.worker.rendezvous.membership import Membership, form
from phalanx.worker.rendezvous.store import Store

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")
FAREWELL = 5.0  # seconds for the other ranks to leave, before the store that this process hosts ends with it


class WorkerProcessGroup(GroupMember):
    """The ranks of a run, and what they do together. With one process nothing is sent, and no port is opened."""

    def __init__(self, membership: Membership, *, seed: int = 0) -> None:
        super().__init__(membership)
        self.pid = os.getpid()
        self.seed = seed
        self.store = Store(_prefixed(membership.store.torch_store, "run"), membership.timeout)
        """`run.store`: keys and values that all ranks share."""
        self.closed = False
        self._values = ValueExchange(membership)
        self._firsts = 0
        self._hooks: list[Callable[[], Callable[[], object] | None]] = []
        ending.watch(self)

    @classmethod
    def join(
        cls,
        backend: str | None = None,
        *,
        method: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        store: Any = None,
        timeout: float | timedelta = 300.0,
        seed: int = 0,
        device: str | torch.device | None = None,
        **more: Any,
    ) -> Self:
        """Join the process group of this run, when all ranks are here. The arguments are those of `phalanx.init`.

        `more` goes to the constructor of the class.
        """
        membership = form(
            backend,
            method=method,
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=timeout,
            device=device,
        )
        return cls(membership, seed=seed, **more)

    # -- groups

    @cached_property
    def local_group(self) -> Any:
        """`run.local_group`: a `torch.distributed` group of the ranks of this node.

        It is made at first use, which all ranks must do together.
        """
        return _new_group(self.membership, "run.local_group", self.topology.local_group)

    @cached_property
    def leader_group(self) -> Any:
        """`run.leader_group`: a `torch.distributed` group of the first rank of every node.

        It is made at first use, which all ranks must do together.
        """
        return _new_group(self.membership, "run.leader_group", self.topology.leader_group)

    # -- together

    def barrier(self) -> None:
        """`run.barrier()`: wait until all ranks have called it."""
        if self.backend:
            import torch.distributed as dist

            alone = self.device.type == "cuda" and self._values.wire.type == "cuda"
            dist.barrier(device_ids=[self.device.index] if alone else None)

    def print(self, *args: object, **options: Any) -> None:
        """`run.print("text")`: print on rank 0 only."""
        if self.is_main:
            print(*args, **{"flush": True, **options})  # noqa: T201

    @contextlib.contextmanager
    def first(self, per: Literal["node", "world"] = "node") -> Iterator[bool]:
        """`with run.first():`: let one rank per node, or per world, run the block first; the others wait for it.

            with run.first():
                path = download()      # the other ranks find what the first one has downloaded

        There is no timeout. The value is True on the first rank.
        """
        if per not in ("node", "world"):
            raise UsageError(f"first(per={per!r}) is not known", details=['expected "node" or "world"'])
        self._firsts += 1
        leader = self.topology.local_ranks[0] if per == "node" else 0
        # Through the store: a download may take longer than the timeout of any collective.
        store, key = self.membership.store.at("first"), f"{self._firsts}/{leader}"
        if self.rank != leader:
            outcome = _when_set(store, key)
            if outcome:
                raise JoinError(f"rank {leader}, which went first, failed: {outcome}")
            yield False
            return
        try:
            yield True
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store is gone; the other ranks notice that themselves
                store.set(key, f"{type(error).__name__}: {error}"[:500])
            raise
        store.set(key, "")

    @overload
    def mean(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def mean(self, x: Number) -> float: ...
    def mean(self, x: Any) -> Any:
        """`run.mean(x)`: return the mean over all ranks, of a number or of each number in a dict.

        A dict takes one exchange.
        """
        return self._values.reduce(x, "mean")

    @overload
    def sum(self, x: Mapping[str, int]) -> dict[str, int]: ...
    @overload
    def sum(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def sum(self, x: int) -> int: ...
    @overload
    def sum(self, x: Number) -> float: ...
    def sum(self, x: Any) -> Any:
        """`run.sum(x)`: return the sum over all ranks, of a number or of each number in a dict. Of ints, an int."""
        return self._values.reduce(x, "sum")

    @overload
    def max(self, x: Mapping[str, int]) -> dict[str, int]: ...
    @overload
    def max(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def max(self, x: int) -> int: ...
    @overload
    def max(self, x: Number) -> float: ...
    def max(self, x: Any) -> Any:
        """`run.max(x)`: return the maximum over all ranks, of a number or of each number in a dict. Of ints, an int."""
        return self._values.reduce(x, "max")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """`run.broadcast(obj)`: return the object of rank `src` on every rank. Plain data and tensors, never pickle."""
        return self._values.broadcast(obj, src)

    def gather(self, obj: T, *, all: bool = False) -> list[T] | None:  # noqa: A002
        """`run.gather(obj)`: return the objects of all ranks on rank 0, None elsewhere; `all=True`: on every rank.

        Plain data and tensors, never pickle.
        """
        return self._values.gather(obj, all=all)

    # -- random numbers

    def seed_everything(self) -> None:
        """`run.seed_everything()`: seed all random generators the same on every rank, so that models are equal."""
        seeds.seed_all(self.seed)

    def seed_apart(self) -> None:
        """`run.seed_apart()`: seed each rank differently, for dropout and augmentation. `run.wrap` calls it."""
        seeds.seed_all(seeds.derive(self.seed, "rank", self.rank))

    @cached_property
    def generator(self) -> torch.Generator:
        """`run.generator`: a random generator for this rank alone."""
        return seeds.generator(self.seed, "generator", self.rank)

    # -- the end

    def before_close(self, callback: Callable[[], object]) -> None:
        """`run.before_close(callback)`: call `callback()` before the process group ends, to release what holds it.

        A bound method does not keep its object alive; any other callback is kept.
        """
        if hasattr(callback, "__self__") and hasattr(callback, "__func__"):
            self._hooks.append(weakref.WeakMethod(callback))
        else:
            self._hooks.append(lambda: callback)

    def close(self, *, failed: bool = False) -> None:
        """`run.close()`: end the process group. After a failure it waits for no rank. Calling it again does nothing."""
        if self.closed or os.getpid() != self.pid:
            return
        failed = failed or ending.is_failure(sys.exc_info()[1])  # as in `finally: run.close()`
        self._let_go()
        if self.membership.owned:
            _destroy(failed)
            _say_farewell(self.membership, failed)

    def _abandon(self) -> None:
        """Leave a group whose connections are cut, without waiting, so that the next one can form."""
        if self.closed:
            return
        self._let_go()
        import torch.distributed as dist

        if dist.is_initialized():
            _destroy_without_waiting()

    def _let_go(self) -> None:
        """Release all that holds the group."""
        self.closed = True
        ending.forget(self)
        hooks, self._hooks = self._hooks, []
        for hook in reversed(hooks):
            if (callback := hook()) is not None:
                try:
                    callback()
                except Exception:
                    logger.debug("callback before the group closes", exc_info=True)
        for name in ("local_group", "leader_group"):
            self.__dict__.pop(name, None)
        if hooks and self.membership.owned:
            # The last holder of a gloo group joins its threads with the GIL held: that must not be a model.
            gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self.close(failed=ending.is_failure(error))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size} on {self.device}, by {self.launcher}>"


def _prefixed(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


def _new_group(membership: Membership, name: str, make: Callable[..., Any]) -> Any:
    """Return `make()`, when all ranks have asked for it. None: there is one process."""
    if not membership.backend:
        return None
    store, me = membership.store.at("groups"), membership.participants[membership.placement.rank]
    roll_call.together(store, me, membership.timeout, name=name, say=tcp_store.notice)
    return make(timeout=timedelta(seconds=membership.timeout))


def _when_set(store: SignedStore, key: str) -> str:
    pause = 0.001
    while not store.check([key]):
        time.sleep(pause)
        pause = min(pause * 1.3, 0.1)
    return store.get(key).decode(errors="replace")


def _destroy(failed: bool) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return  # the script has done it itself
    if not failed:
        dist.destroy_process_group()
        return
    ending.keep_groups()
    _destroy_without_waiting()


def _destroy_without_waiting() -> None:
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
    """Keep the store for ranks that are a little behind, before this process ends and the store with it."""
    if not membership.store_on_a_rank or not (membership.hosts_store or tcp_store.answers(membership.place)):
        return
    store = membership.store.at("farewell")
    with contextlib.suppress(RuntimeError):  # torch's, when the store is gone
        gone = store.add("gone", 1)
        end = time.monotonic() + (FAREWELL if membership.hosts_store and not failed else 0)
        while gone < membership.placement.world_size and time.monotonic() < end:
            time.sleep(0.005)
            gone = store.add("gone", 0)
