"""Describes what the driver reports about the GPU of a rank, as lines of evidence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from phalanx.diagnose import words
from phalanx.diagnose.evidence import Evidence, Gpu, Rank, Xid
from phalanx.diagnose.verdict import Verdict

BUSY = 0.95
_IDLE = 0.05
_REPLAYS = 10  # fewer PCIe replays are normal
_MOST = 8  # maximum lines of a verdict
_XID = 160  # maximum characters of a driver message
_OF_PROGRAMS = {13, 31, 43, 45, 68, 69}  # Xids that a program causes: an illegal address, a kernel that was ended


def idle(gpu: Gpu | None) -> bool:
    """Return whether a GPU is known to be idle."""
    return gpu is not None and not gpu.lost and 0 <= gpu.use <= _IDLE


def busy(gpu: Gpu | None) -> bool:
    """Return whether this rank keeps its GPU busy."""
    return gpu is not None and gpu.use >= BUSY and not gpu.shared


def use(gpu: Gpu | None) -> str:
    """Return e.g. " (GPU 1, 100% in use)"."""
    if gpu is None:
        return ""
    return f" (GPU {gpu.index}, {gpu.use:.0%} in use)" if gpu.use >= 0 else f" (GPU {gpu.index})"


def faults(gpu: Gpu, pid: int | None = None) -> list[str]:
    """Return hardware faults. `pid` is that of the rank: errors of another program are ignored."""
    mine = [xid for xid in sorted(gpu.xids, key=lambda xid: xid.age) if _concerns(xid, pid)]
    reported = {f"Xid {xid.number}, {words.duration(xid.age)} ago: {xid.text[:_XID]}": None for xid in mine}
    found = [*reported][:3]
    if gpu.ecc > 0:
        found.append(f"{_count(gpu.ecc, 'uncorrectable memory error')} (ECC) since the driver was loaded")
    if gpu.remap_failed:
        found.append("a memory row could not be remapped: the GPU has to be replaced")
    if gpu.remap_pending:
        found.append("memory rows or pages wait to be replaced: the GPU needs a reset")
    return found


def _concerns(xid: Xid, pid: int | None) -> bool:
    """Return whether an error is about this process."""
    named = re.search(r"pid='?(\d+)", xid.text) if xid.number in _OF_PROGRAMS else None
    return named is None or pid is None or int(named[1]) == pid


def signs(gpu: Gpu) -> list[str]:
    """Return what slows a GPU down or may point to a fault."""
    found = [f"slowed down: {gpu.throttled} throttling"] if gpu.throttled else []
    if gpu.nvlink_down > 0:
        found.append(f"{_count(gpu.nvlink_down, 'NVLink')} down")
    if gpu.nvlink_errors > 0:
        found.append(f"{_count(gpu.nvlink_errors, 'NVLink error')} since the driver was loaded")
    if gpu.pcie_replays >= _REPLAYS:
        found.append(f"{gpu.pcie_replays} PCIe replays since the driver was loaded")
    return found


def supported(evidence: Evidence, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts, each with what is known about the GPUs of its ranks.

    A verdict without ranks is about all ranks. A fault on a rank without a verdict is added to the first verdict.
    """
    if not verdicts:
        return []
    by_rank = {rank.rank: rank for rank in evidence.ranks if rank.gpu is not None}
    reported: set[int] = set()
    found: list[Verdict] = []
    for verdict in verdicts:
        ranks = [by_rank[rank] for rank in verdict.ranks or sorted(by_rank) if rank in by_rank and rank not in reported]
        lines = [line for rank in ranks for line in _lines(rank, slight=True)]
        reported |= {rank.rank for rank in ranks}
        found.append(_with(verdict, lines))
    others = [line for rank in by_rank.values() if rank.rank not in reported for line in _lines(rank, slight=False)]
    return [_with(found[0], others), *found[1:]]


def _lines(rank: Rank, *, slight: bool) -> list[str]:
    if rank.gpu is None:
        return []
    pid = rank.process.pid if rank.process is not None else None
    lines = [*faults(rank.gpu, pid), *(signs(rank.gpu) if slight else ())]
    return [f"rank {rank.rank}, GPU {rank.gpu.index}: {line}" for line in lines]


def _with(verdict: Verdict, lines: Sequence[str]) -> Verdict:
    return replace(verdict, details=(*verdict.details, *lines[:_MOST])) if lines else verdict


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
