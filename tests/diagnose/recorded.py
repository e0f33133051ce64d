"""Entries in the format of torch's flight recorder, and evidence made from them in the same way as from real ones.

The format is FlightRecorder<EventType>::getCollectiveTrace in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp
(torch 2.11 and 2.13, version "2.10" of the dump); torch/distributed/flight_recorder/components/types.py reads it, and
lists the names of operations. In a coalesced block, each collective has an entry, all with the same collective_seq_id,
and "nccl:coalesced" comes last, without sizes. A send or recv has the number of the previous collective, and is_p2p.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.diagnose.evidence import Evidence, GroupEvidence, History, Rank
from phalanx.forkserver.probe.collectives import recorded_calls
from phalanx.forkserver.probe.collectives.collective_history import CollectiveHistory as Kept
from phalanx.launcher.evidence import evidence_reply
from tests.diagnose.made_evidence import C10D, HOME, collective, evidence, rank

Entry = dict[str, Any]


def entry(
    op: str,
    seq: int,
    *shape: int,
    line: int = 12,
    outputs: Sequence[Sequence[int]] | None = None,
    inputs: Sequence[Sequence[int]] | None = None,
    dtype: str = "Float",
    group: str = "0",
    backend: str = "nccl",
    p2p: int = 0,
    frames: Sequence[tuple[str, int, str]] | None = None,
    **more: Any,
) -> Entry:
    ins = [list(shape)] if inputs is None else [list(each) for each in inputs]
    outs = ins if outputs is None else [list(each) for each in outputs]
    called = op.partition(" ")[0]
    stack = frames if frames is not None else [(C10D, 3252, called), (HOME + "train.py", line, "main")]
    return {
        "frames": [{"name": name, "filename": file, "line": number} for file, number, name in stack],
        "record_id": seq - 1,
        "pg_id": int(group) if group.isdecimal() else 7,
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "thread_name": "pt_main_thread",
        "thread_id": "139812345678901",
        "collective_seq_id": seq,
        "p2p_seq_id": p2p,
        "op_id": seq + p2p,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": 1_794_823_294_461_591_905 + seq,
        "input_sizes": ins,
        "input_dtypes": [dtype] * len(ins),
        "output_sizes": outs,
        "output_dtypes": [dtype] * len(outs),
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_794_823_294_471_591_905 + seq,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": p2p > 0,
        **more,
    }


def coalesced(seq: int, *parts: Entry, p2p: int = 0) -> list[Entry]:
    return [*parts, entry("coalesced", seq, inputs=[], p2p=p2p)]


def reply(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the reply that a worker makes from these entries, after encoding and decoding."""
    kept = Kept(recorded_calls.operation_name, recorded_calls.dtype_names, lambda _, root: root)
    kept.add(entries)
    return json.loads(json.dumps({"threads": [], "calls": [], "history": kept.to_dict()}))


def history(entries: Sequence[Entry]) -> History:
    return evidence_reply.read(reply(entries)).history


def stalled(histories: Mapping[int, Sequence[Entry]], groups: Mapping[str, Sequence[int]] | None = None) -> Evidence:
    """Return evidence in which all ranks are in a barrier after these histories."""
    return evidence(
        *(_rank(number, entries, groups or {"0": list(histories)}) for number, entries in histories.items())
    )


def _rank(number: int, entries: Sequence[Entry], groups: Mapping[str, Sequence[int]]) -> Rank:
    newest = max((each["collective_seq_id"] for each in entries), default=0)
    mine = [
        GroupEvidence(name=name, backend="nccl", ranks=tuple(ranks), enqueued=newest, completed=newest)
        for name, ranks in groups.items()
        if number in ranks
    ]
    return rank(number, collective("barrier", 90), groups=mine, history=history(entries))
