"""Forms the process group: from the launcher's variables to a process group of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.contract.messages.worker_messages import Assignment
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.contract.variables import rank_variables
from phalanx.errors import JoinError, UsageError
from phalanx.forkserver.signed_store import SignedStore
from phalanx.worker import ending
from phalanx.worker.rendezvous import addresses, device, methods, roll_call, tcp_store
from phalanx.worker.rendezvous.device import check_backend, kind
from phalanx.worker.rendezvous.identity import PHALANX, Identity, identify
from phalanx.worker.rendezvous.methods import MeetingPoint
from phalanx.worker.rendezvous.roll_call import Participant
from phalanx.worker.rendezvous.topology import Topology

if TYPE_CHECKING:
    import torch

LONGEST = 1e9  # seconds: the maximum of torch

_files: dict[str, Any] = {}  # stores, by their paths
_formed = 0  # number of groups of this process: a later one must not read the keys of an earlier one in the store
_generations: Counter[int] = Counter()  # the same per generation: one training may follow another


@dataclass(frozen=True)
class Membership:
    """This rank in a process group that has formed."""

    identity: Identity
    participants: tuple[Participant, ...]  # all ranks
    topology: Topology
    placement: RankPlacement
    device: torch.device
    backend: str
    store: SignedStore  # with a prefix for this group
    hosts_store: bool  # whether this process hosts the store, which ends with it
    place: MeetingPoint
    owned: bool  # whether the process group was created here, and must be destroyed here
    timeout: float

    @property
    def store_on_a_rank(self) -> bool:
        """Whether the store ends with one of the ranks."""
        return self.place.kind == "tcp" and not _hosted(self.identity, self.place)

    @property
    def lasting_store(self) -> SignedStore:
        """The store for keys that later generations of the group also read."""
        from torch.distributed import PrefixStore

        if self.identity.generation is None:
            return self.store
        prefix = "/".join(["phalanx", *filter(None, [self.identity.attempt]), "all generations"])
        return SignedStore(PrefixStore(prefix, self.store.torch_store.underlying_store), prefix)


def form(
    backend: str | None = None,
    *,
    method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    timeout: float | timedelta = 300.0,
    device: str | torch.device | None = None,
    assignment: Assignment | None = None,
    offer: str = "",
    met: Callable[[Membership], None] | None = None,
) -> Membership:
    """Wait until all ranks have arrived, form the process group, and return this rank's membership in it.

    assignment  the current rank and world size of this process, if they differ from those at its start
    offer       what all other ranks receive from this one when they meet
    met         called when all ranks have arrived, before the group forms

    The other arguments are those of `phalanx.init`.
    """
    import torch.distributed as dist

    timeout = _seconds(timeout)
    if method is not None and store is not None:
        raise UsageError("method and store both say where to meet", fix="leave one of them out")
    if store is not None and not isinstance(store, dist.Store):
        raise UsageError(
            f"store={store!r} is not a store of torch.distributed",
            details=["expected a TCPStore, a FileStore, or another that all ranks share"],
            fix="leave store out: phalanx.init()",
        )
    check_backend(backend)
    if dist.is_initialized():
        _refuse_another(backend, method=method, rank=rank, world_size=world_size, store=store)
        return _adopt(device, timeout)
    environ = os.environ
    if assignment is not None:
        environ.update(rank_variables(assignment))
        if assignment.devices is not None:  # a spare has not used any device yet
            environ["CUDA_VISIBLE_DEVICES"] = assignment.devices
    parsed = methods.parse(method)
    identity = identify(
        environ,
        rank=parsed.rank if rank is None else rank,
        world_size=parsed.world_size if world_size is None else world_size,
    )
    if assignment is not None:
        identity = replace(identity, generation=assignment.generation)
    if identity.nobody and (parsed.place is not None or store is not None):
        raise UsageError(
            "the rank and the world size are not known",
            details=[f"{'the store that was given' if store is not None else method} only says where to meet"],
            fix=f"phalanx.init({'store=store' if store is not None else f'method={method!r}'}, rank=0, world_size=2)",
        )
    for note in identity.notes:
        tcp_store.notice(note)
    place = methods.choose(identity, parsed, environ, given=store is not None)
    hosts_store = place.kind == "tcp" and _hosts_store(identity, place)
    bare = store if store is not None else _open(place, identity, hosts_store, timeout)
    where, participants = _meet(bare, identity, place, environ, timeout, offer=offer, kind=kind(device))
    return _found(
        backend,
        device,
        identity,
        participants,
        store=where,
        place=place,
        hosts_store=hosts_store,
        timeout=timeout,
        met=met,
    )


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or not 0 < seconds < LONGEST:
        raise UsageError(
            f"timeout={timeout!r} is not a valid timeout", details=["expected seconds"], fix="phalanx.init(timeout=300)"
        )
    return seconds


def _hosts_store(identity: Identity, place: MeetingPoint) -> bool:
    """Return whether this rank hosts the store. At an address other than the launcher's, rank 0 does."""
    if (place.host, place.port) == (identity.address, identity.port):
        return identity.hosts_store
    return identity.rank == 0


def _hosted(identity: Identity, place: MeetingPoint) -> bool:
    return identity.hosted and (place.host, place.port) == (identity.address, identity.port)


def _open(place: MeetingPoint, identity: Identity, hosts_store: bool, timeout: float) -> Any:
    from torch.distributed import HashStore

    if place.kind == "alone":
        return HashStore()
    if place.kind == "tcp":
        return tcp_store.open_store(
            place, replace(identity, hosts_store=hosts_store, hosted=_hosted(identity, place)), timeout
        )
    return _open_file(place, identity, timeout)


def _open_file(place: MeetingPoint, identity: Identity, timeout: float) -> Any:
    from torch.distributed import FileStore

    if place.path in _files:
        return _files[place.path]
    folder = os.path.dirname(place.path)
    try:
        if os.path.basename(folder) == "meetings":
            os.makedirs(folder, mode=0o700, exist_ok=True)
        # torch does not report a file that it cannot open: it retries until the timeout.
        with open(place.path, "ab"):
            pass
    except OSError as error:
        raise JoinError(
            f"the ranks meet in {place}, which cannot be written on {socket.gethostname()}: {error.strerror}",
            fix='a file that every rank sees: phalanx.init(method="file:///SHARED/PATH"); or set MASTER_ADDR',
        ) from None
    made = FileStore(place.path, identity.world_size)
    made.set_timeout(timedelta(seconds=timeout))
    # torch writes to the file again when the store is destroyed, after the last rank has removed it.
    ending.keep(made)
    _files[place.path] = made
    atexit.register(_leave, place.path, identity.world_size, os.getpid())
    return made


def _leave(path: str, world_size: int, pid: int) -> None:
    """Remove the file if this is the last rank: its contents would prevent another group from meeting there."""
    with contextlib.suppress(RuntimeError, OSError):  # at interpreter exit: the file may already be removed
        if os.getpid() == pid and _files[path].add("phalanx/left", 1) == world_size:
            os.unlink(path)


def _meet(
    bare: Any,
    identity: Identity,
    place: MeetingPoint,
    environ: Mapping[str, str],
    timeout: float,
    *,
    offer: str = "",
    kind: str = "",
) -> tuple[SignedStore, tuple[Participant, ...]]:
    """Hold the roll call; return the store with a prefix for this group, and all participants."""
    global _formed
    from torch.distributed import PrefixStore

    _formed += 1
    which = str(_formed)
    # A replacement has formed fewer groups than the ranks that it meets.
    if identity.generation is not None:
        _generations[identity.generation] += 1
        which = f"generation {identity.generation}.{_generations[identity.generation]}"
    prefix = "/".join(["phalanx", *filter(None, [identity.attempt]), which])
    store = SignedStore(PrefixStore(prefix, bare), prefix)
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    me = roll_call.here(identity, address=_address(place), devices=devices, offer=offer, kind=kind)
    return store, roll_call.call(store, me, timeout, place=describe(place, identity), say=tcp_store.notice)


def describe(place: MeetingPoint, identity: Identity) -> str:
    """Describe where the ranks meet, and that it is loopback, unless all ranks are known to be on this host."""
    loopback = place.kind == "tcp" and (place.host == "localhost" or addresses.is_loopback(place.host))
    on_this_host = identity.placement.local_world_size == identity.world_size
    return f"{place}, which no other host can reach" if loopback and not on_this_host else f"{place}"


def _address(place: MeetingPoint) -> str:
    """Return the address by which other ranks reach this host, if it is known."""
    if place.kind == "alone":
        return ""
    if place.kind == "tcp":
        try:
            found = addresses.resolve(place.host, place.port)
        except OSError:
            found = []
        if found and (local := addresses.route_to(found[0])) and not addresses.is_loopback(local):
            return local
    return next((address for _, address in addresses.own()), "")


def _found(
    backend: str | None,
    asked: str | torch.device | None,
    identity: Identity,
    participants: tuple[Participant, ...],
    *,
    store: SignedStore,
    place: MeetingPoint,
    hosts_store: bool,
    timeout: float,
    met: Callable[[Membership], None] | None,
) -> Membership:
    import torch.distributed as dist

    where = roll_call.topology(participants, identity.rank, identity.topology)
    placement = roll_call.placement(participants, where)
    own = device.wanted(asked, local_rank=_device_number(identity, placement))
    name = device.backend_for(backend, own, [one.kind for one in participants], [one.machine for one in participants])
    device.refuse_sharing(own, name, [participants[rank].devices for rank in where.local_ranks])
    device.use(own)
    membership = Membership(
        identity,
        participants,
        where,
        placement,
        own,
        name,
        store,
        hosts_store,
        place,
        owned=True,
        timeout=timeout,
    )
    if met is not None:
        met(membership)
    choose_interface(identity, participants, place)
    eager = own if own.type == "cuda" and "nccl" in name else None
    dist.init_process_group(
        name,
        store=dist.PrefixStore("group", store.torch_store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=eager,
    )
    _tell_ranks(dist.group.WORLD)
    return membership


def _device_number(identity: Identity, placement: RankPlacement) -> int:
    """Return the launcher's local rank, if it gives one: with --virtual-local-rank every rank sees one device, as 0."""
    given = identity.placement.local_rank
    return placement.local_rank if given is None else given


def _tell_ranks(group: Any) -> None:
    """Set the ranks of the members in the backends of the default group.

    torch knows them only for the first group of a process. In a later default group (for example after a recovery), a
    split, as made by a device mesh, reads ranks from an empty list and crashes.
    """
    for device_type in group._device_types:
        backend = group._get_backend(device_type)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        options: Any = getattr(backend, "options", None)
        if hasattr(options, "global_ranks_in_group"):
            options.global_ranks_in_group = list(range(group.size()))


def _refuse_another(
    backend: str | None, *, method: str | None, rank: int | None, world_size: int | None, store: Any
) -> None:
    """Raise if the arguments do not match the existing process group."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import BackendConfig

    there = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend_config()}
    asked: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if backend is not None:
        asked["backend"] = str(BackendConfig(dist.Backend(backend)))
    wrong = [
        f"{name}={value!r} was given" for name, value in (("method", method), ("store", store)) if value is not None
    ]
    wrong += [
        f"{name}={value} was given, but it is {there[name]}"
        for name, value in asked.items()
        if value is not None and value != there[name]
    ]
    if wrong:
        raise UsageError(
            f"this process is already in a process group: rank {there['rank']} of {there['world_size']}",
            details=wrong,
            fix="phalanx.init() uses that group; for another, first group.close() or dist.destroy_process_group()",
        )


def _adopt(asked: str | torch.device | None, timeout: float) -> Membership:
    """Use a process group that the script or a library has created. It is not destroyed here."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    identity = identify(os.environ, rank=dist.get_rank(), world_size=dist.get_world_size())
    place = MeetingPoint("given", setting="the store of the process group")
    store, participants = _meet(_get_default_store(), identity, place, os.environ, timeout)
    where = roll_call.topology(participants, identity.rank, identity.topology)
    placement = roll_call.placement(participants, where)
    own = device.wanted(asked, local_rank=_device_number(identity, placement))
    device.use(own)
    backend = str(dist.get_backend_config())
    return Membership(
        identity, participants, where, placement, own, backend, store, False, place, owned=False, timeout=timeout
    )


def choose_interface(identity: Identity, participants: tuple[Participant, ...], place: MeetingPoint) -> None:
    """Choose an interface for gloo if the host name resolves to loopback: gloo sends that address to other ranks."""
    if identity.launcher == PHALANX or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    me = participants[identity.rank]
    others = [participant for participant in participants if participant.machine != me.machine]
    if not others or not addresses.name_misleads():
        return
    targets = [participant.address for participant in others if participant.address]
    if place.kind == "tcp":
        with contextlib.suppress(OSError):
            found = addresses.resolve(place.host, place.port)
            targets = [one for one in found if not addresses.is_loopback(one)] + targets
    for target in targets:
        local = target if addresses.is_own(target) else addresses.route_to(target)
        if local and (name := addresses.interface_of(local)):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            os.environ.setdefault("TP_SOCKET_IFNAME", name)
            return
