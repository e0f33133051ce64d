"""Converts entries of a flight recorder to calls that the agent compares."""

from __future__ import annotations

import sys
import time
from typing import Any

from ... import paths
from . import recorders
from .current_call import C10D_FILE, MAX_FRAMES, OPERATIONS
from .group_progress import global_rank

_PER_GROUP = 40  # calls

# Names in the recorder -> names in torch
_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def pending() -> dict[str, Any]:
    """Return the newest unfinished collective, except NCCL's; empty: none."""
    found = [recorders.read(recorder, collectives=True).get("entries", []) for recorder in ("fr", "phalanx")]
    entries = [each for some in found for each in some]
    waiting = [entry for entry in entries if not entry.get("retired") and not is_inner(entry)]
    if not waiting:
        return {}
    call = to_call(max(waiting, key=lambda entry: int(entry["time_created_ns"])), time.time_ns())
    return {name: call[name] for name in ("op", "group", "seq", "dtypes", "shapes", "peer", "tag", "reduction")}


def is_inner(entry: dict[str, Any]) -> bool:
    """Return whether phalanx's own groups made this call internally: it has no name, and the script did not call it."""
    return not entry["process_group"][0] and paths.FLIGHT_RECORDER in sys.modules


def newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest entries of each group."""
    counts: dict[Any, int] = {}
    chosen = []
    for entry in reversed(entries):
        count = counts[entry["pg_id"]] = counts.get(entry["pg_id"], 0) + 1
        if count <= _PER_GROUP:
            chosen.append(entry)
    return chosen[::-1]


def to_call(entry: dict[str, Any], now: int, *, timed: bool = False) -> dict[str, Any]:
    """Return an entry as a call. `timed`: the recorder knows when kernels start (TORCH_NCCL_ENABLE_TIMING)."""
    backend, _, text = entry["profiling_name"].rpartition(":")
    op, _, ends = text.partition(" ")  # "nccl:send 0->1"
    group = str(entry["process_group"][0])
    peer, root = entry.get("peer"), entry.get("root")
    if peer is not None:
        peer = global_rank(group, peer) if peer >= 0 else None  # any source
    elif entry.get("is_p2p") and ends:
        numbers = ends.replace("<-", "->").split("->")
        peer = global_rank(group, int(numbers[1])) if len(numbers) == 2 and numbers[1].isdigit() else None
    site = [[one["filename"], one["line"], one["name"]] for one in entry.get("frames", [])[:MAX_FRAMES]]
    return {
        "group": group,
        "seq": number_of(entry),
        "op": operation_name(site, op),
        "dtypes": dtype_names(entry.get("input_dtypes") or entry.get("output_dtypes") or []),
        "shapes": [list(shape) for shape in entry.get("input_sizes", [])][:8],
        "outputs": [list(shape) for shape in entry.get("output_sizes", [])][:8],
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
        "age": round(max(0, now - int(entry["time_created_ns"])) / 1e9, 3),
        "site": site,
        "peer": peer,
        "tag": entry.get("tag"),
        "reduction": entry.get("reduction", ""),
        "root": None if root is None else global_rank(group, root),
        "backend": backend,
        "started": bool(entry.get("time_discovered_started_ns")) if timed else None,
    }


def timed_calls(entries: list[dict[str, Any]]) -> set[tuple[Any, int]]:
    """Return the collectives of which it is known whether their kernel has started: all if torch times them, except the
    parts of a coalesced block. Otherwise the start is unknown, or recorded with the end.
    """
    times = [(entry.get("time_discovered_started_ns"), entry.get("time_discovered_completed_ns")) for entry in entries]
    if not any(start and start != end for start, end in times):
        return set()
    counts: dict[tuple[Any, int], int] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            key = entry["pg_id"], number_of(entry)
            counts[key] = counts.get(key, 0) + 1
    return {key for key, count in counts.items() if count == 1}


def number_of(entry: dict[str, Any]) -> int:
    """Return the sequence number of a collective; 0: a message."""
    return 0 if entry.get("is_p2p") else int(entry["collective_seq_id"])


def _name_from_site(site: list[list[Any]]) -> str:
    """Return the name in torch.distributed: gloo records a reduce_scatter as the all_reduce that it uses."""
    return next((name for file, _, name in site if file.endswith(C10D_FILE) and name in OPERATIONS), "")


def operation_name(site: list[list[Any]], op: str) -> str:
    """Return the name of an operation, from its call site or its record."""
    return _name_from_site(site) or _OPS.get(op, op.lower())


def dtype_names(names: list[str]) -> list[str]:
    """Return torch's names of dtypes, without duplicates."""
    return list(dict.fromkeys(_DTYPES.get(name, name.lower()) for name in names))
