"""Values that phalanx reads from the store, which has no password: anyone who can connect can write to it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from phalanx.collectives.engines.hierarchical import failure_propagation
from phalanx.contract.ranks import topology
from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.errors import PhalanxError
from phalanx.train.elastic import state_offer
from phalanx.train.elastic.memfd_tensors import OpenedMemfd
from phalanx.train.reporting import rank_log
from phalanx.worker.process_group import objects
from phalanx.worker.rendezvous import roll_call
from phalanx.worker.rendezvous.roll_call import Participant
from tests.fuzz.campaign import Check
from tests.fuzz.mutation import altered, mutated

PARTICIPANT = Participant(PartialPlacement(rank=1, world_size=2), "host", "host boot", 7, "10.0.0.1", "0,1", "", "cpu")
PLAIN = {"step": 3, "shape": [2, 3], "names": ("a", "b"), "weight": torch.ones(2, 3), "empty": torch.empty(0, 4)}
Reader = Callable[[bytes], Any]
READERS: dict[str, tuple[bytes, Reader]] = {
    "participant": (msgspec.msgpack.encode(PARTICIPANT), roll_call._participant.decode),
    "participants": (msgspec.msgpack.encode((PARTICIPANT,) * 3), roll_call._all_participants.decode),
    "object": (objects.encode(PLAIN), objects.decode),
    "offer": (
        b'{"holds":true,"step":3,"epoch":1,"layouts":[]}',
        lambda body: state_offer.offers([body.decode()]),
    ),
    "rows": (msgspec.msgpack.encode([]), rank_log._rows),
    "failure": (
        b'{"call":3,"text":"boom","kind":"PeerLost","rank":1}',
        lambda body: msgspec.json.decode(body, type=failure_propagation.FailureMessage),
    ),
    "topology": (b"0-3|4,5,7", lambda body: topology.decode(body.decode())),
    "memory": (b"1 3 0 100", lambda body: OpenedMemfd(body.decode())),
}
EXPECTED = (PhalanxError, ValueError, msgspec.MsgspecError, OverflowError)  # these end the rank with a message
LARGEST = 1 << 24  # elements that a reader may create from a value of a few kilobytes


@contextlib.contextmanager
def opened() -> Iterator[Check]:
    """Yield the check of one value."""
    made: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        found = empty(*args, **{**options, "device": "meta"})
        made.append(found.numel())
        return empty(*args, **options) if found.numel() < LARGEST else found

    torch.empty = counted  # type: ignore[assignment]
    try:
        yield lambda chance, note: check(chance, note, made)
    finally:
        torch.empty = empty


def check(chance: random.Random, note: Callable[[object], None], made: list[int]) -> None:
    """Let a reader read a value."""
    made.clear()
    name = chance.choice([*READERS])
    valid, read = READERS[name]
    content = mutated(valid, chance)
    if chance.random() < 0.5 and name not in ("topology", "memory"):
        decode, encode = (msgspec.json.decode, msgspec.json.encode)
        if name in ("participant", "participants", "rows", "object"):
            decode, encode = (msgspec.msgpack.decode, msgspec.msgpack.encode)
        with contextlib.suppress(OverflowError, TypeError, RecursionError, UnicodeEncodeError):
            content = encode(altered(decode(valid), chance))
    note((name, content))
    with contextlib.suppress(*EXPECTED):
        read(content)
    assert max(made, default=0) < LARGEST, f"{max(made):,} elements were allocated for {len(content)} bytes"
