"""What the NVIDIA driver reported to the kernel's log about its GPUs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.doctor.finding import Finding, Level
from phalanx.doctor.quantity import several

CHECK = "gpus"

# What the driver writes to the kernel's log, of which the GPU and not the program is the cause.
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


@dataclass(frozen=True)
class Xid:
    number: int
    bus: str  # without the function: 0000:3b:00
    age: float  # seconds
    text: str


def read() -> tuple[Xid, ...]:
    """Nothing where the log is for root only."""
    return tuple(find_xids(kernel_log(), time.clock_gettime(time.CLOCK_BOOTTIME)))


def kernel_log(path: str = "/dev/kmsg") -> list[str]:
    """All that is in the kernel's log, where it may be read."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    lines: list[str] = []
    try:
        while record := os.read(log, 8192):
            lines.append(record.decode(errors="replace"))
    except BlockingIOError:
        pass  # the end
    except OSError:
        pass  # overwritten while we read: what we have will do
    finally:
        os.close(log)
    return lines


def find_xids(lines: Sequence[str], now: float) -> Iterator[Xid]:
    """The driver's complaints, from records of the kernel's log; `now` is seconds since the machine started."""
    for line in lines:
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)", line)
        stamp = re.match(r"\d+,\d+,(\d+),", line)
        if match:
            age = now - int(stamp[1]) / 1e6 if stamp else 0.0
            text = line.partition(";")[2].splitlines() or [line.strip()]
            yield Xid(int(match[2]), match[1].lower(), max(age, 0.0), text[0])


def judge(xids: Sequence[Xid]) -> Iterator[Finding]:
    seen: dict[tuple[int, str], list[Xid]] = {}
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
