"""The process group of a run, as one rank sees it: who it is, and what all ranks do together.

group = phalanx.init()            # in `phalanx.main(train)`: run.group
group.print(f"{group.world_size} ranks")
loss = group.mean(loss)
group.close()                     # optional: it closes with the process
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from phalanx.errors import JoinError, UsageError
from phalanx.forkserver.signed_store import SignedStore
from phalanx.worker import ending
from phalanx.worker.process_group import seeds
from phalanx.worker.process_group.closing import GroupClosing
from phalanx.worker.process_group.member import GroupMember
from phalanx.worker.process_group.resize_hook import ResizeHook
from phalanx.worker.process_group.values import Number, ValueExchange
from phalanx.worker.rendezvous import roll_call, tcp_store
from phalanx.worker.rendezvous.membership import Membership, form
from phalanx.worker.rendezvous.store import Store

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class WorkerProcessGroup(GroupMember):
    """The ranks of a run, and what they do together. `phalanx.init()` returns it; in a `Run` it is `run.group`.

        group = phalanx.init()
        with group.first():                 # one rank per node first
            data = load(download())
        ...
        loss = group.mean(loss)             # over all ranks
        group.print(f"{group.world_size} ranks: {loss:.3f}")

    With one process nothing is sent, and no port is opened. The group closes with the process.
    """

    def __init__(self, membership: Membership, *, seed: int = 0) -> None:
        super().__init__(membership)
        self.pid = os.getpid()
        self.seed = seed
        self.store = Store(_prefixed(membership.store.torch_store, "run"), membership.timeout)
        """`group.store`: keys and values that all ranks share."""
        self.closed = False
        self._values = ValueExchange(membership)
        self._firsts = 0
        self._generator = seeds.RankGenerator(seed, self.rank)
        self.resizing = ResizeHook(self.world_size)
        self.closing = GroupClosing(membership)
        self._printing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
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
    ) -> Self:
        """Join the process group of this run, once all ranks have arrived. The arguments are those of
        `phalanx.init`.
        """
        seeds.check(seed)
        membership = form(
            backend,
            method=method,
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=timeout,
            device=device,
        )
        return cls(membership, seed=seed)

    # -- groups

    @cached_property
    def local_group(self) -> Any:
        """`group.local_group`: a `torch.distributed` group of the ranks of this node.

        It is made at first use, which all ranks must do together.
        """
        return _new_group(self.membership, "group.local_group", self.topology.local_group)

    @cached_property
    def leader_group(self) -> Any:
        """`group.leader_group`: a `torch.distributed` group of the first rank of every node.

        It is made at first use, which all ranks must do together.
        """
        return _new_group(self.membership, "group.leader_group", self.topology.leader_group)

    # -- together

    def barrier(self) -> None:
        """`group.barrier()`: wait until all ranks have called it."""
        if self.backend:
            import torch.distributed as dist

            alone = self.device.type == "cuda" and self._values.wire.type == "cuda"
            dist.barrier(device_ids=[self.device.index] if alone else None)

    def print(self, *args: object, **options: Any) -> None:
        """`group.print("text")`: print on rank 0 only. In a run, above its progress bar."""
        if self.is_main:
            with self._printing():
                print(*args, **{"flush": True, **options})  # noqa: T201

    def print_inside(self, context: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        """Make `print` enter `context()`: a run that draws a progress bar makes room for the text."""
        self._printing = context

    @contextlib.contextmanager
    def first(self, per: Literal["node", "world"] = "node") -> Iterator[bool]:
        """`with group.first():`: let one rank per node, or per world, run the block first; the others wait for it.

            with group.first():
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
            with contextlib.suppress(RuntimeError):  # the store has ended; the other ranks notice that themselves
                store.set(key, f"{type(error).__name__}: {error}"[:500])
            raise
        store.set(key, "")

    @overload
    def mean(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def mean(self, x: Number) -> float: ...
    def mean(self, x: Any) -> Any:
        """`group.mean(x)`: return the mean over all ranks, of a number or of each number in a dict.

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
        """`group.sum(x)`: return the sum over all ranks, of a number or of each number in a dict. Of ints, an int."""
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
        """`group.max(x)`: return the maximum over all ranks, of a number or of each in a dict. Of ints, an int."""
        return self._values.reduce(x, "max")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """`group.broadcast(obj)`: return the object of rank `src` on every rank.

        Plain data and tensors, never pickle.
        """
        return self._values.broadcast(obj, src)

    def gather(self, obj: T, *, all: bool = False) -> list[T] | None:  # noqa: A002
        """`group.gather(obj)`: return the objects of all ranks on rank 0, None elsewhere; `all=True`: on every rank.

        Plain data and tensors, never pickle.
        """
        return self._values.gather(obj, all=all)

    # -- random numbers

    def seed_everything(self) -> None:
        """`group.seed_everything()`: seed all random generators the same on every rank, so that models are equal."""
        seeds.seed_all(self.seed)

    def seed_apart(self) -> None:
        """`group.seed_apart()`: seed each rank differently, for dropout and augmentation. `run.wrap` calls it."""
        seeds.seed_all(seeds.derive(self.seed, "rank", self.rank))

    @property
    def generator(self) -> torch.Generator:
        """`group.generator`: a random generator for this rank alone. `run.batches` seeds it again for every batch."""
        return self._generator.get()

    def seed_generator(self, value: int) -> None:
        """Seed `generator` with `value` before it is used again."""
        self._generator.seed(value)

    # -- another number of ranks

    def on_resize(self, hook: Callable[[int, int], object]) -> None:
        """`run.group.on_resize(hook)`: let `run.keep` call `hook(before, now)` if the number of ranks has changed.

            run.group.on_resize(lambda before, now: scale(opt, now / before))     # the learning rate, for example

        It changes when nodes join or leave, or when a checkpoint of a run of another size is resumed. Call this before
        `run.keep`. With `run.loader(global_batch=...)` the global batch stays the same and there is nothing to do; with
        `batch_size=...` the batch of each rank does.
        """
        self.resizing.set(hook)

    # -- the end

    def before_close(self, callback: Callable[[], object]) -> None:
        """`group.before_close(callback)`: call `callback()` before the process group ends, to release what holds it.

        A bound method does not keep its object alive; any other callback is kept.
        """
        self.closing.before(callback)

    def close(self, *, failed: bool = False) -> None:
        """`group.close()`: end the process group. Calling it again does nothing.

        In a run, wait until everything is saved, and raise if a save has failed. `failed=True` does not wait for other
        ranks. A group closes by itself at the end of `phalanx.main`, and when the process ends.
        """
        if self.closed or os.getpid() != self.pid:  # a fork is not part of its parent's group
            return
        failed = failed or ending.is_failure(sys.exc_info()[1])  # as in `finally: group.close()`
        self.closing.close(self, failed=failed)

    def abandon(self) -> None:
        """Leave a group whose connections are cut, without waiting, so that the next one can form."""
        if not self.closed:
            self.closing.abandon(self)

    def forget_groups(self) -> None:
        """Release `local_group` and `leader_group`: this group ends."""
        for name in ("local_group", "leader_group"):
            self.__dict__.pop(name, None)

    if not TYPE_CHECKING:  # a type checker must not assume that every name exists

        def __getattr__(self, name: str) -> Any:
            """Raise an error that says where a name of the training API is, if it is one."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises as Python does
            message = f"{type(self).__name__} has no {name!r}. Training needs a run: run = phalanx.Run(group)"
            raise AttributeError(message, name=name, obj=self)

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
    """Return `make()`, once all ranks have requested it. None: there is one process."""
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
