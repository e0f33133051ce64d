"""Explains the errors of the NVIDIA driver in the kernel log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.cluster.xids import XidLine
from phalanx.doctor.finding import Finding, Level
from phalanx.doctor.quantity import several

CHECK = "gpus"

# Xid errors that are caused by the GPU, not by the program.
_XIDS: Mapping[int, tuple[Level, str]] = {
    48: ("yellow", "an error in its memory that could not be corrected"),
    62: ("yellow", "its internal controller halted"),
    63: ("yellow", "a page of its memory was retired, or a row replaced"),
    64: ("red", "a page of its memory could not be retired, or a row not replaced"),
    74: ("yellow", "an error on NVLink"),
    79: ("red", "it fell off the bus"),
    92: ("yellow", "many memory errors that were corrected"),
    94: ("yellow", "a memory error that was contained"),
    95: ("red", "a memory error that was not contained"),
    119: ("yellow", "its system processor does not answer"),
    120: ("yellow", "its system processor failed"),
    140: ("yellow", "memory errors that could not be corrected"),
}


def judge(xids: Sequence[XidLine]) -> Iterator[Finding]:
    """Yield a finding for each kind of GPU error in the kernel log."""
    seen: dict[tuple[int, str], list[XidLine]] = {}
    for xid in xids:
        if xid.number in _XIDS:
            seen.setdefault((xid.number, xid.bus), []).append(xid)
    for (number, bus), reports in seen.items():
        level, what = _XIDS[number]
        last = min(xid.age for xid in reports)
        yield Finding(
            CHECK,
            level,
            f"the driver reported Xid {number} for the GPU at {bus}, "
            f"{several(len(reports), 'time')}, the last {_ago(last)}: {what}",
            "a fault of the hardware or the driver, not of a program",
            f"dmesg | grep Xid; https://docs.nvidia.com/deploy/xid-errors (Xid {number})",
        )


def _ago(age: float) -> str:
    if age < 7200:
        return f"{age / 60:.0f} min ago"
    return f"{age / 3600:.0f} h ago" if age < 172800 else f"{age / 86400:.0f} days ago"
