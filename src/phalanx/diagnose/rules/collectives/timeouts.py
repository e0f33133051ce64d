"""Parses the messages of collectives, barriers and store calls that timed out.

The rank that raises the timeout is the victim; absent.py finds the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.forkserver import paths


@dataclass(frozen=True)
class Timeout:
    """What the message says."""

    seconds: float = 0.0  # 0: not in the message
    ranks: tuple[int, ...] = ()  # missing ranks, by their number in the group
    key: str = ""  # key of the store
    address: str = ""  # host:port of a store that did not answer
    op: str = ""  # the collective, if NCCL's watchdog names it
    seq: int = 0
    group: str = ""


_PATTERNS = (  # compiled when a rank fails, not when a run starts
    r"Ranks? (?P<ranks>\d+(, ?\d+)*) failed to pass monitoredBarrier in (?P<ms>\d+) ?ms",
    r"Rank \d+ timed out in monitoredBarrier after (?P<ms>\d+) ?ms",
    r"Timed out waiting (?P<ms>\d+) ?ms for (recv|send) operation",  # gloo
    r"wait timeout after (?P<ms>\d+) ?ms, keys: (?P<key>\S+)",  # TCPStore
    r"Timed out after (?P<s>\d+) seconds waiting for clients",
    r"socket has timed out after (?P<ms>\d+) ?ms while trying to connect to \((?P<host>[^,]+), (?P<port>\d+)\)",
    rf"\b{paths.TIMED_OUT}: .*\branks? (?P<ranks>\d+(?:(?:, | and )\d+)*)(?: \(.*?\))? did not come within "
    r"the timeout of (?P<s>[\d.]+) s",
    rf"\b{paths.TIMED_OUT}: ",
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+),"
    r".*?Timeout\(ms\)=(?P<ms>\d+)",
)
_DEFAULT = "0"  # torch's name for the group of all ranks
_GUID = r"PG GUID (?P<group>[^\s()\]]+)"
_NCCL = {  # operations as NCCL's watchdog names them
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}


def read(text: str) -> Timeout | None:
    """Return the timeout that a message reports. None: not one of torch.distributed or of a phalanx group."""
    found = next((match for pattern in _PATTERNS if (match := re.search(pattern, text))), None)
    if found is None:
        return None
    fields = found.groupdict()
    seconds = float(fields["ms"]) / 1000 if fields.get("ms") else float(fields.get("s") or 0)
    guid = re.search(_GUID, text) if fields.get("op") else None
    op = fields.get("op") or ""
    return Timeout(
        seconds=seconds,
        ranks=tuple(map(int, re.findall(r"\d+", fields.get("ranks") or ""))),
        key=(fields.get("key") or "").rpartition("//")[2] or (fields.get("key") or ""),
        address=f"{fields['host']}:{fields['port']}" if fields.get("port") else "",
        op=_NCCL.get(op, op.lower()),
        seq=int(fields.get("seq") or 0),
        group=guid["group"] if guid else _DEFAULT if op else "",
    )


def timed_out(text: str) -> bool:
    """Return whether an error message reports the timeout of a collective."""
    return read(text) is not None
