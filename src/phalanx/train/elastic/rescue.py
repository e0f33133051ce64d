"""Rescues a state that only one rank has, when that rank cannot leave its lost group: a complete snapshot.

A second thread writes it while the main thread sleeps in an operation that never ends. Nothing is exchanged with other
ranks. The ranks of the next group find it like any other snapshot.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from functools import partial
from typing import TYPE_CHECKING

import torch

from phalanx.train.checkpoint import randomness, state
from phalanx.train.checkpoint.format.plain import packed
from phalanx.train.checkpoint.shares import share
from phalanx.train.snapshot.found import RESCUE
from phalanx.train.snapshot.part import Part, Writer

if TYPE_CHECKING:
    from phalanx.train.elastic.state_offer import StateOffer
    from phalanx.worker.snapshot_memory import SnapshotMemoryClient


def rescue(offer: StateOffer, client: SnapshotMemoryClient, still: str) -> str:
    """Write the snapshot; return "", or why it was not written. Raises LaunchError if there is no memory.

    `still`: the `stillness` of the main thread, before `offer` was made.
    """
    if offer.sharded:
        return "it has a shard, not the whole state"
    offer.put_back()
    found = state.taken(offer.kept)
    if found.sharded:
        return "it has a shard, not the whole state"
    for gpu in {tensor.device for tensor in found.tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(gpu)  # the last update may be in any stream
    part = Part(
        offer.step,
        secrets.token_hex(4),
        offer.rank,
        (offer.rank,),
        packed({"epoch": offer.epoch, "layouts": offer.layouts}, "extra", {}),
        found.plain,
        randomness.packed(randomness.taken()),
    )
    name = f"{offer.rank}.{RESCUE}"
    writer = Writer(partial(client.lend, name))
    try:
        placed = writer.take(share(found.tensors, 0, 1, frozenset(found.own)))
        if stillness() != still:  # before the seal is made: it may be a mixture of two steps
            client.drop(name)
            return "its main thread continued"
        writer.finish(part, placed)
    finally:
        writer.close()
    return ""


def stillness() -> str | None:
    """Return a text that changes when the main thread runs. None: it is not asleep."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        if status["State"].startswith("S"):
            return f"{status['voluntary_ctxt_switches']} {status['nonvoluntary_ctxt_switches']}"
    return None
