"""The operation of torch.distributed that a thread is in, from the local variables of torch's own functions."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from ... import log, thread_frames
from .. import stacks
from . import group_progress
from .recorders import WORLD

MAX_FRAMES = 24  # per call
C10D_FILE = "torch/distributed/distributed_c10d.py"

# Operations that are not recorded -> the variable that contains the peer
UNRECORDED = {
    "send": "group_dst",
    "recv": "group_src",
    "monitored_barrier": "",
    "init_process_group": "",
    "new_group": "",
}

OPERATIONS = frozenset(
    (
        *UNRECORDED,
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather"),
        *("scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
        *("all_to_all", "barrier", "all_reduce_coalesced", "all_gather_coalesced"),
    )
)


def is_operation(frame: FrameType) -> bool:
    """Return whether this is the frame of an operation of torch.distributed."""
    return frame.f_code.co_name in OPERATIONS and frame.f_code.co_filename.endswith(C10D_FILE)


def find(frame: FrameType | None) -> dict[str, Any]:
    """Return the operation of torch.distributed that this thread is in; empty: none."""
    while frame is not None:
        if is_operation(frame):
            try:
                return {"op": frame.f_code.co_name, **_variables(frame)}
            except Exception:  # the thread continues meanwhile
                log.swallowed("forkserver.probe.collectives.current_call")
        frame = frame.f_back
    return {}


def add_unrecorded(calls: list[dict[str, Any]], still: float) -> None:
    """Add the current call if it is not recorded; otherwise add details from its variables that the record lacks."""
    with thread_frames.reading():
        frame = stacks.main()
        now = find(frame)
        site = stacks.frames(frame, MAX_FRAMES)
    if not now:
        return
    if now["op"] not in UNRECORDED or any(call["op"] == now["op"] and not call["done"] for call in calls):
        waiting = [call for call in calls if not call["done"] and call["group"] == now["group"]]
        if waiting and now["reduction"]:
            waiting[-1]["reduction"] = now["reduction"]
        return
    calls.append(
        {
            "seq": 0,
            "outputs": [],
            "done": False,
            "age": round(still, 3),
            "site": site,
            **now,
        }
    )


def _variables(frame: FrameType) -> dict[str, Any]:
    """Read the local variables of a function of torch.distributed, whose names are torch's. No user variable is
    read.
    """
    names = frame.f_locals
    world = sys.modules[WORLD]
    group = names.get("group") or getattr(getattr(world, "GroupMember", None), "WORLD", None)
    peer_variable = UNRECORDED.get(frame.f_code.co_name, "")
    tensor: Any = next(
        (names[name] for name in ("tensor", "input_tensor", "input") if hasattr(names.get(name), "dtype")), None
    )
    peer = names.get(peer_variable)
    if peer is not None:
        ranks = group_progress.ranks(group)
        peer = ranks[peer] if 0 <= peer < len(ranks) else peer
    elif peer_variable:
        peer = names.get(peer_variable.removeprefix("group_"))
    tag = names.get("tag") if peer_variable else None
    reduction = getattr(names.get("op"), "op", names.get("op"))
    return {
        "group": str(world._world.pg_names.get(group, "")) if group is not None else "",
        "dtypes": [str(tensor.dtype).removeprefix("torch.")] if tensor is not None else [],
        "shapes": [[int(size) for size in tensor.shape]] if tensor is not None else [],
        "peer": peer if isinstance(peer, int) else None,
        "tag": tag if isinstance(tag, int) else None,
        "reduction": str(getattr(reduction, "name", "") or ""),
    }
