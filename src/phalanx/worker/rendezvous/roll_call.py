"""The roll call: all ranks meet at the store before the group forms, so that a timeout can name the missing ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from phalanx.contract.ranks.placement import PartialPlacement, RankPlacement
from phalanx.contract.ranks.topology import decode
from phalanx.errors import JoinError
from phalanx.forkserver.signed_store import ForgedValueError, SignedStore
from phalanx.worker.rendezvous.identity import Identity
from phalanx.worker.rendezvous.topology import Topology

NOTICE = 3.0
SHOWN = 16  # ranks that a message names one by one
READ_TIMEOUT = 3.0  # seconds for all present ranks to read the reason of a failure, before the store may end


class Participant(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank about itself."""

    placement: PartialPlacement
    host: str
    machine: str  # unique per host; host names may not be
    pid: int
    address: str = ""
    devices: str | None = None  # CUDA_VISIBLE_DEVICES, which may differ between ranks of a node
    offer: str = ""  # the state that it has, for a handover
    kind: str = ""  # of its device: "cpu", "cuda"

    @property
    def rank(self) -> int:
        """The rank, as in its placement."""
        return self.placement.rank

    @property
    def world_size(self) -> int:
        """The world size, as in its placement."""
        return self.placement.world_size

    def __str__(self) -> str:
        where = f" ({self.address})" if self.address else ""
        return f"rank {self.rank} on {self.host}{where}, pid {self.pid}"


_all_participants: msgspec.msgpack.Decoder[tuple[Participant, ...]] = msgspec.msgpack.Decoder(tuple[Participant, ...])
_participant: msgspec.msgpack.Decoder[Participant] = msgspec.msgpack.Decoder(Participant)


def here(
    identity: Identity, *, address: str = "", devices: str | None = None, offer: str = "", kind: str = ""
) -> Participant:
    """Return the report of this process."""
    return Participant(
        placement=identity.placement,
        host=socket.gethostname(),
        machine=f"{socket.gethostname()} {_boot()}",
        pid=os.getpid(),
        address=address,
        devices=devices,
        offer=offer,
        kind=kind,
    )


def _boot() -> str:
    """Return the boot id: two hosts may have the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def call(
    store: SignedStore, me: Participant, timeout: float, *, place: str, say: Callable[[str], None] = lambda _: None
) -> tuple[Participant, ...]:
    """Wait for all ranks, and return their reports by rank. `place`: where the store is, for messages."""
    try:
        _come_in(store, me, place)
        if me.world_size == 1:
            return (me,)
        return _count(store, me, timeout, place, say) if me.rank == 0 else _listen(store, me, timeout, place, say)
    except ForgedValueError as error:
        raise JoinError(
            f"rank {me.rank} does not trust what it reads in the store: {error}",
            details=[f"it is at {place}"],
            fix="find out who connects to that port; every rank must be started by the same phalanx run",
        ) from None
    except RuntimeError as error:  # torch's
        raise JoinError(
            f"the store is gone: the process that hosted it ended while rank {me.rank} waited for the others",
            details=[f"it was at {place}", f"torch says: {str(error).partition(chr(10))[0]}"],
            fix="see the output of rank 0, which hosts the store if the launcher does not",
        ) from None


def _come_in(store: SignedStore, me: Participant, place: str) -> None:
    first = store.add(f"door/{me.rank}", 1) == 1
    if first:
        store.set(_key(me.rank), msgspec.msgpack.encode(me))
        return
    # The first process with this rank may be between the two calls.
    _await(store, [_key(me.rank)], 1.0, me.world_size)
    other = _participant.decode(store.get(_key(me.rank))) if store.check([_key(me.rank)]) else None
    raise JoinError(
        f"rank {me.rank} is already there{f': {other}' if other else ''}",
        details=[f"this is pid {me.pid} on {me.host}; they meet at {place}"],
        fix="give every process a different RANK"
        + (
            ", and remove the file if it is left from an earlier run"
            if place.startswith("the file")
            else "; a process that a rank has started must not join (unset RANK); two jobs need different MASTER_PORTs"
        ),
    )


def _count(
    store: SignedStore, me: Participant, timeout: float, place: str, say: Callable[[str], None]
) -> tuple[Participant, ...]:
    """Wait for all ranks on rank 0, and send the result to the others."""
    keys = [_key(rank) for rank in range(me.world_size)]

    def waiting() -> None:
        say(f"rank 0 waits for {_ranks(_missing(store, me.world_size))} at {place}")

    # A rank that arrives at the last moment counts.
    if not _await(store, keys, timeout, me.world_size, waiting) and (missing := _missing(store, me.world_size)):
        raise _refused(store, me, _absent(store, me, missing, timeout, place))
    participants = tuple(_participant.decode(value) for value in store.multi_get(keys))
    if odd := [participant for participant in participants if participant.world_size != me.world_size]:
        error = JoinError(
            "the ranks have different world sizes",
            details=[
                f"rank 0: WORLD_SIZE={me.world_size}",
                *(f"{one}: WORLD_SIZE={one.world_size}" for one in odd),
            ],
            fix="the same WORLD_SIZE for every rank",
        )
        raise _refused(store, me, error)
    store.set("participants", msgspec.msgpack.encode(participants))
    store.set("verdict", msgspec.msgpack.encode(None))
    return participants


def _refused(store: SignedStore, me: Participant, error: JoinError) -> JoinError:
    """Send the error of rank 0 to all present ranks, and return it."""
    here = me.world_size - len(_missing(store, me.world_size))
    store.set("verdict", msgspec.msgpack.encode([error.what, list(error.details), error.fix, here]))
    _hear(store, here)
    return error


def _hear(store: SignedStore, here: int) -> None:
    """Wait until the other ranks have read the error: the store may end with this process."""
    end = time.monotonic() + READ_TIMEOUT
    with contextlib.suppress(RuntimeError):  # raised by torch if the store has ended
        readers = store.add("read", 1)
        while readers < here and time.monotonic() < end:
            time.sleep(0.01)
            readers = store.add("read", 0)


def _listen(
    store: SignedStore, me: Participant, timeout: float, place: str, say: Callable[[str], None]
) -> tuple[Participant, ...]:
    def waiting() -> None:
        if not store.check([_key(0)]):
            say(f"rank {me.rank} waits for rank 0 at {place}")

    # Wait slightly longer than rank 0, whose message about missing ranks is the same for all.
    if not _await(store, ["verdict"], timeout + 2, me.world_size, waiting):
        # Rank 0 may have arrived and ended before it had counted.
        raise _absent(store, me, _missing(store, me.world_size) or [0], timeout, place)
    verdict = msgspec.msgpack.decode(store.get("verdict"))
    if verdict is not None:
        what, details, fix, here = verdict
        _hear(store, here)
        raise JoinError(what, details=details, fix=fix)
    participants = _all_participants.decode(store.get("participants"))
    if len(participants) != me.world_size:
        raise JoinError(
            "the ranks have different world sizes",
            details=[f"rank 0: WORLD_SIZE={len(participants)}", f"{me}: WORLD_SIZE={me.world_size}"],
            fix="the same WORLD_SIZE for every rank",
        )
    return participants


def together(store: SignedStore, me: Participant, timeout: float, *, name: str, say: Callable[[str], None]) -> None:
    """Wait until all ranks are about to create `name` together; raise an error with the missing ranks after the
    timeout.
    """
    store.set(f"{name}/{me.rank}", "")
    keys = [f"{name}/{rank}" for rank in range(me.world_size)]

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    def waiting() -> None:
        say(f"rank {me.rank} waits for {_ranks(missing())} in {name}, which all ranks must call")

    if not _await(store, keys, timeout, me.world_size, waiting) and (absent := missing()):
        raise JoinError(
            f"{name} was asked for by rank {me.rank}, and in {timeout:g} s not by {_ranks(absent)}",
            details=["all ranks must call it, even those that are not members of the group"],
            fix=f"group = {name}   on every rank, outside of any condition",
        )


def _absent(store: SignedStore, me: Participant, missing: list[int], timeout: float, place: str) -> JoinError:
    present = [rank for rank in range(me.world_size) if rank not in set(missing)]
    participants = [_participant.decode(store.get(_key(rank))) for rank in present[:SHOWN]]
    more = f"here: {len(present) - SHOWN} more" if len(present) > SHOWN else ""
    return JoinError(
        f"{len(missing)} of {me.world_size} ranks did not come in {timeout:g} s: {_ranks(missing)}",
        details=[
            *(f"here: {participant}" for participant in participants),
            *([more] if more else []),
            f"they meet at {place}",
        ],
        fix="see why the missing ones did not start or stopped before phalanx.init; "
        "they need the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
    )


def _missing(store: SignedStore, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not store.check([_key(rank)])]


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 4-7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(words)}"


def _key(rank: int) -> str:
    return f"here/{rank}"


def _await(
    store: SignedStore, keys: list[str], timeout: float, ranks: int, waiting: Callable[[], None] = lambda: None
) -> bool:
    """Wait until all keys are set. It polls: torch's `wait` blocks signals, and prints warnings at a timeout.

    `ranks`: how many poll at the same time.
    """
    start, noticed = time.monotonic(), False
    while not store.check(keys):
        passed = time.monotonic() - start
        if passed > timeout:
            return False
        if not noticed and passed > NOTICE:
            noticed = True
            waiting()
        # Poll often at first, then less. Few ranks poll more often: survivors wait here for the rank that joins them.
        time.sleep(min(max(passed * min(ranks, 32) / 256, 0.0005), 0.05))
    return True


def topology(participants: Sequence[Participant], rank: int, spelled: str = "") -> Topology:
    """Return the topology: from `phalanx run`, else by the launcher's nodes, else by host."""
    if spelled:
        return Topology(decode(spelled), rank)
    by_node = all(participant.placement.node_rank is not None for participant in participants)
    nodes: dict[object, list[int]] = {}
    for participant in participants:
        nodes.setdefault(participant.placement.node_rank if by_node else participant.machine, []).append(
            participant.rank
        )
    order = sorted(nodes, key=lambda node: node) if by_node else list(nodes)  # type: ignore[arg-type, return-value]
    return Topology(tuple(tuple(nodes[node]) for node in order), rank)


def placement(participants: Sequence[Participant], where: Topology) -> RankPlacement:
    """Return the placement of this rank, with the launcher's local rank if that is unique on the node.

    With --virtual-local-rank it is not unique.
    """
    local_ranks = [participants[rank].placement.local_rank for rank in where.local_ranks]
    mine = participants[where.rank].placement.local_rank
    unique = sorted(map(str, local_ranks)) == sorted(map(str, range(len(local_ranks))))
    return RankPlacement(
        rank=where.rank,
        world_size=len(participants),
        local_rank=mine if mine is not None and unique else where.local_rank,
        local_world_size=len(where.local_ranks),
        node_rank=where.node_rank,
        node_count=len(where.nodes),
    )
