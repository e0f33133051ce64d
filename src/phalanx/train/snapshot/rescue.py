"""A rank that cannot leave its group, and alone has the state: what it holds, as a whole snapshot of its own.

By a thread beside the one that trains, which sleeps in an operation that nobody will end. No word is exchanged with
other ranks. What comes of it is found by those who take their places, as any other snapshot is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from phalanx.train.checkpoint import randomness, state
from phalanx.train.checkpoint.plain import packed
from phalanx.train.checkpoint.shares import share
from phalanx.train.snapshot.found import RESCUE
from phalanx.train.snapshot.part import Part, Writer

if TYPE_CHECKING:
    from phalanx.train.elastic.state_offer import StateOffer
    from phalanx.worker.snapshot_memory import SnapshotMemoryClient


def rescue(past: StateOffer, vault: SnapshotMemoryClient, still: str) -> str:
    """Why not, if not; then there is nothing of it. Raises LaunchError where there is no room.

    `still`: the `stillness` of the main thread, before it was looked at what it holds.
    """
    if past.sharded:
        return "it has a shard, and not all of the state"
    past.put_back()
    found = state.taken(past.kept)
    if any(isinstance(tensor, DTensor) for tensor in found.tensors.values()):
        return "it has a shard, and not all of the state"
    for gpu in {tensor.device for tensor in found.tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(gpu)  # whatever stream the training has asked for its last update in
    part = Part(
        past.step,
        secrets.token_hex(4),
        past.rank,
        (past.rank,),
        packed({"epoch": past.epoch, "layouts": past.layouts}, "extra", {}),
        found.plain,
        randomness.packed(randomness.taken()),
    )
    name = f"{past.rank}.{RESCUE}"
    writer = Writer(partial(vault.lend, name))
    try:
        placed = writer.take(share(found.tensors, 0, 1, frozenset(found.own)))
        if stillness() != still:  # before there is a seal: nobody finds what may be of two steps
            vault.drop(name)
            return "its main thread went on"
        writer.finish(part, placed)
    finally:
        writer.close()
    return ""


def stillness() -> str | None:
    """Of the main thread: the same text later says that it has not run in between. None: it does not sleep now."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/status") as file:
        told = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        if told["State"].startswith("S"):
            return f"{told['voluntary_ctxt_switches']} {told['nonvoluntary_ctxt_switches']}"
    return None
