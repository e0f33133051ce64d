"""The ranks of a run, as one of them sees it: who it is, what they share, what they do together.

group = Group.join()
group.print(f"{group.world_size} ranks")
loss = group.mean(loss)
group.close()                     # or nothing: it closes with the process
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from phalanx.errors import JoinError, UsageError
from phalanx.worker.process_group import ending, nccl, objects, seeds
from phalanx.worker.rendezvous import roll_call, tcp_store
from phalanx.worker.rendezvous.membership import Membership, form
from phalanx.worker.rendezvous.store import Store

if TYPE_CHECKING:
    import torch

    from phalanx.contract.worker_messages import Assignment
    from phalanx.worker.rendezvous.topology import Topology

T = TypeVar("T")
Number = Any  # int, float, or a tensor of one element

ROUND = 64  # numbers that go together
FAREWELL = 5.0  # for the others to leave, before the store that this process keeps ends with it


class WorkerProcessGroup:
    """Alone, it works like many: nothing is sent, and no port is opened."""

    def __init__(self, membership: Membership, *, seed: int = 0) -> None:
        identity = membership.identity
        self.membership = membership
        self.pid = os.getpid()
        self.rank: int = identity.rank
        self.world_size: int = identity.world_size
        self.topology: Topology = membership.topology
        self.local_rank: int = membership.local_rank
        self.local_world_size: int = len(self.topology.local_ranks)
        self.node_rank: int = self.topology.node_rank
        self.nodes: int = len(self.topology.nodes)
        self.device: torch.device = membership.device
        self.backend: str = membership.backend
        self.launcher: str = identity.launcher
        self.folder: str | None = identity.folder
        self.seed = seed
        self.store = Store(_prefixed(membership.store, "run"), membership.timeout)
        self.closed = False
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
        world: Assignment | None = None,
        word: str = "",
        met: Callable[[Membership], None] | None = None,
    ) -> Self:
        """Finds out who this process is, waits until all are here, and forms the group.

        method    env:// (whoever started this process says where), tcp://HOST:PORT, file:///SHARED/PATH
        timeout   seconds: for everybody to come, and for every operation of the group
        device    this rank's GPU if there is one; "cpu" for none
        """
        membership = form(
            backend,
            method=method,
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=timeout,
            device=device,
            world=world,
            word=word,
            met=met,
        )
        return cls(membership, seed=seed)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # -- groups

    @cached_property
    def local_group(self) -> Any:
        """The ranks of this node. It is made at first use, which has to be by every rank of the world."""
        return self._made("run.local_group", self.topology.local_group)

    @cached_property
    def leader_group(self) -> Any:
        """The first rank of every node. It is made at first use, which has to be by every rank of the world."""
        return self._made("run.leader_group", self.topology.leader_group)

    # -- together

    def barrier(self) -> None:
        """Until all ranks are here."""
        if self.backend:
            import torch.distributed as dist

            alone = self.device.type == "cuda" and self._wire.type == "cuda"
            dist.barrier(device_ids=[self.device.index] if alone else None)

    def print(self, *args: object, **options: Any) -> None:
        """On rank 0 alone."""
        if self.is_main:
            print(*args, **{"flush": True, **options})  # noqa: T201

    @contextlib.contextmanager
    def first(self, per: Literal["node", "world"] = "node") -> Iterator[bool]:
        """One rank goes in first, the rest wait outside until it is through, as long as it takes.

        with run.first():
            path = download()      # the others find what the first one has fetched
        """
        if per not in ("node", "world"):
            raise UsageError(f"first(per={per!r}) is not known", details=['expected "node" or "world"'])
        self._firsts += 1
        leader = self.topology.local_ranks[0] if per == "node" else 0
        # Through the store, for what is fetched may take longer than any collective waits.
        store, key = _prefixed(self.membership.store, "first"), f"{self._firsts}/{leader}"
        if self.rank != leader:
            outcome = _when_set(store, key)
            if outcome:
                raise JoinError(f"rank {leader}, which went first, failed: {outcome}")
            yield False
            return
        try:
            yield True
        except BaseException as error:
            with contextlib.suppress(Exception):
                store.set(key, f"{type(error).__name__}: {error}"[:500])
            raise
        store.set(key, "")

    @overload
    def mean(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def mean(self, x: Number) -> float: ...
    def mean(self, x: Any) -> Any:
        """Of a number or a dict of numbers, over all ranks; a dict takes one exchange."""
        return self._reduce(x, "mean")

    @overload
    def sum(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def sum(self, x: Number) -> float: ...
    def sum(self, x: Any) -> Any:
        return self._reduce(x, "sum")

    @overload
    def max(self, x: Mapping[str, Number]) -> dict[str, float]: ...
    @overload
    def max(self, x: Number) -> float: ...
    def max(self, x: Any) -> Any:
        return self._reduce(x, "max")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`, on every rank: plain data and tensors."""
        if not 0 <= src < self.world_size:
            raise UsageError(f"broadcast(src={src}): there are ranks 0 to {self.world_size - 1}")
        data, refusal = _encoded(obj) if self.rank == src else (b"", None)
        if self.world_size > 1:
            import torch
            import torch.distributed as dist

            size = torch.tensor([-1 if refusal else len(data)], dtype=torch.int64, device=self._wire)
            dist.broadcast(size, src)
            _refuse({src: int(size.item())}, refusal)
            body = _to_tensor(data, int(size.item()), self._wire)
            dist.broadcast(body, src)
            if self.rank == src:
                return obj
            data = _to_bytes(body)
        elif refusal:
            raise refusal
        return objects.decode(data, self.device)  # type: ignore[no-any-return]

    def gather(self, obj: T, *, all: bool = False) -> list[T] | None:  # noqa: A002
        """The objects of all ranks, on rank 0, None elsewhere; `all=True`: on every rank."""
        data, refusal = _encoded(obj)
        if self.world_size == 1:
            if refusal:
                raise refusal
            return [objects.decode(data, self.device)]
        import torch
        import torch.distributed as dist

        size = torch.tensor([-1 if refusal else len(data)], dtype=torch.int64, device=self._wire)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        lengths = [int(one.item()) for one in sizes]
        _refuse(dict(enumerate(lengths)), refusal)
        body = _to_tensor(data, max(lengths), self._wire)
        if all:
            bodies = [torch.empty_like(body) for _ in lengths]
            dist.all_gather(bodies, body)
        else:
            bodies = [torch.empty_like(body) for _ in lengths] if self.is_main else []
            dist.gather(body, bodies or None, dst=0)
            if not self.is_main:
                return None
        return [
            objects.decode(_to_bytes(one[:length]), self.device) for one, length in zip(bodies, lengths, strict=True)
        ]

    # -- random numbers

    def seed_everything(self) -> None:
        """The same numbers on every rank, so that all make the same model."""
        seeds.seed_all(self.seed)

    def seed_apart(self) -> None:
        """From here on, other numbers on every rank: for dropout and augmentation, once the model is made."""
        seeds.seed_all(seeds.derive(self.seed, "rank", self.rank))

    @cached_property
    def generator(self) -> torch.Generator:
        """A stream of this rank's own, untouched by anything else."""
        return seeds.generator(self.seed, "generator", self.rank)

    # -- the end

    def before_close(self, callback: Callable[[], object]) -> None:
        """Called when the group closes, before it ends: to let go of what holds it, as a wrapped model does.

        A method is not kept alive by this; anything else is.
        """
        if hasattr(callback, "__self__") and hasattr(callback, "__func__"):
            self._hooks.append(weakref.WeakMethod(callback))
        else:
            self._hooks.append(lambda: callback)

    def close(self, *, failed: bool = False) -> None:
        """Ends the process group. After a failure nobody is waited for. A second time does nothing."""
        if self.closed or os.getpid() != self.pid:
            return
        failed = failed or ending.is_failure(sys.exc_info()[1])  # as in `finally: run.close()`
        self._let_go()
        if self.membership.owned:
            _destroy(failed)
            self._say_farewell(failed)

    def abandon(self) -> None:
        """Leave a group whose connections are cut: nobody in it waits for anybody, and the next one can be formed."""
        if self.closed:
            return
        self._let_go()
        import torch.distributed as dist

        if dist.is_initialized():
            with contextlib.suppress(Exception):
                _destroy_for_good()

    def _let_go(self) -> None:
        """Of all that holds the group."""
        self.closed = True
        ending.forget(self)
        hooks, self._hooks = self._hooks, []
        for hook in reversed(hooks):
            if (callback := hook()) is not None:
                with contextlib.suppress(Exception):
                    callback()
        for name in ("local_group", "leader_group"):
            self.__dict__.pop(name, None)
        if hooks and self.membership.owned:
            # The last holder of a gloo group joins its threads while it has Python's lock: no model may be that.
            gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self.close(failed=ending.is_failure(error))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size} on {self.device}, by {self.launcher}>"

    # -- how

    def _say_farewell(self, failed: bool) -> None:
        """Nobody takes the store away from those who are still at work, if they are not too far behind."""
        membership = self.membership
        if not membership.kept_by_a_rank or not (membership.keeper or tcp_store.answers(membership.place)):
            return
        store = _prefixed(membership.store, "farewell")
        with contextlib.suppress(Exception):
            gone = store.add("gone", 1)
            end = time.monotonic() + (FAREWELL if membership.keeper and not failed else 0)
            while gone < self.world_size and time.monotonic() < end:
                time.sleep(0.005)
                gone = store.add("gone", 0)

    def _made(self, name: str, make: Callable[..., Any]) -> Any:
        if not self.backend:
            return None
        membership = self.membership
        store, me = _prefixed(membership.store, "groups"), membership.people[self.rank]
        roll_call.together(store, me, membership.timeout, name=name, say=tcp_store.notice)
        return make(timeout=timedelta(seconds=membership.timeout))

    @cached_property
    def _wire(self) -> torch.device:
        """Where small things are exchanged: the CPU where the backend can, for it disturbs no stream."""
        import torch

        # "nccl", "cuda:nccl": for the GPU alone. Any other name alone is for the CPU too.
        alone = self.backend and "cpu:" not in self.backend and ("nccl" in self.backend or ":" in self.backend)
        return self.device if alone else torch.device("cpu")

    def _reduce(self, x: Any, how: Literal["mean", "sum", "max"]) -> Any:
        if not isinstance(x, Mapping):
            return self._reduced([x], how, 0, "a number")[0]
        names = sorted(x)
        # Names are not exchanged, but that they are the same is seen.
        values = self._reduced([x[name] for name in names], how, zlib.crc32("\0".join(names).encode()), f"{names}")
        return dict(zip(names, values, strict=True))

    def _reduced(self, values: list[Any], how: str, check: int, names: str) -> list[float]:
        import torch
        import torch.distributed as dist

        for value in values:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(
                    f"{how} takes one number of each rank, not a tensor of shape {list(value.shape)}",
                    fix=f"run.{how}(x.mean()), or torch.distributed.all_reduce(x) for the tensor itself",
                )
        numbers = _stacked(values, self._wire, how)
        if not self.backend:
            return [float(number) for number in numbers.tolist()]
        # Largest and smallest at once: max of the check, and of its negative.
        whole = torch.zeros(_room(len(values)), dtype=torch.float64, device=self._wire)
        whole[: len(values)] = numbers
        whole[-2:] = torch.tensor([check, -check], dtype=torch.float64)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        *found, high, low = whole.tolist()
        del found[len(values) :]
        expected = check if how == "max" else check * self.world_size
        if (high, low) != (expected, -expected):
            raise UsageError(f"{how} of a dict: the ranks have different names in it; rank {self.rank} has {names}")
        return [number / self.world_size for number in found] if how == "mean" else found


def _encoded(obj: Any) -> tuple[bytes, UsageError | None]:
    """What cannot be sent is no reason to leave the others waiting for it."""
    try:
        return objects.encode(obj), None
    except UsageError as error:
        return b"", error


def _refuse(sizes: Mapping[int, int], mine: UsageError | None) -> None:
    """On every rank alike where one has something that cannot be sent."""
    if mine is not None:
        raise mine
    for rank, size in sizes.items():
        if size < 0:
            raise UsageError(f"rank {rank} has something that cannot be sent; its own message says why")


def _plain(value: Any, how: str) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"{how} takes a number or a dict of them, not {value!r}", fix=f"run.{how}(float(x)), run.gather(x)"
        ) from None


def _stacked(values: list[Any], wire: torch.device, how: str) -> torch.Tensor:
    """As float64 on the wire; what is on an accelerator comes in one copy."""
    import torch

    far = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor) and value.device != wire]
    numbers = torch.tensor(
        [0.0 if place in far else _plain(value, how) for place, value in enumerate(values)], dtype=torch.float64
    ).to(wire)
    if far:
        numbers[far] = torch.stack([values[place].detach().reshape(()).double() for place in far]).to(wire)
    return numbers


def _room(count: int) -> int:
    """For so many numbers and the check. The same for dicts that differ in length, which torch would not survive."""
    return -(-(count + 2) // ROUND) * ROUND


def _prefixed(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


def _when_set(store: Any, key: str) -> str:
    pause = 0.001
    while not store.check([key]):
        time.sleep(pause)
        pause = min(pause * 1.3, 0.1)
    return str(bytes(store.get(key)).decode(errors="replace"))


def _to_tensor(data: bytes, size: int, wire: torch.device) -> torch.Tensor:
    import torch

    padded = bytearray(size)
    padded[: len(data)] = data
    return (
        torch.frombuffer(padded, dtype=torch.uint8).to(wire) if size else torch.empty(0, dtype=torch.uint8, device=wire)
    )


def _to_bytes(body: torch.Tensor) -> bytes:
    return bytes(body.cpu().numpy().tobytes())


def _destroy_for_good() -> None:
    import torch.distributed as dist

    if "nccl" in str(dist.get_backend_config()):
        nccl.abort()
        nccl.forget_groups()
    else:
        dist.destroy_process_group()


def _destroy(failed: bool) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return  # the script has done it itself
    if not failed:
        dist.destroy_process_group()
        return
    ending.keep_groups()
    with contextlib.suppress(Exception):
        _destroy_for_good()
