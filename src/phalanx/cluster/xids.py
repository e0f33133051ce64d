"""Errors of the NVIDIA driver in the kernel log."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class XidLine:
    """A GPU error in the kernel log."""

    number: int
    bus: str  # without the function: 0000:3b:00
    age: float  # seconds
    text: str


def read() -> tuple[XidLine, ...]:
    """Return the errors; empty if only root can read the log."""
    return tuple(find_xids(kernel_log(), time.clock_gettime(time.CLOCK_BOOTTIME)))


def kernel_log(path: str = "/dev/kmsg") -> list[str]:
    """Return the kernel log, if it can be read."""
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
        pass  # overwritten during the read: what was read so far is enough
    finally:
        os.close(log)
    return lines


def find_xids(lines: Sequence[str], now: float) -> Iterator[XidLine]:
    """Yield the errors in records of the kernel log. `now`: seconds since boot."""
    for line in lines:
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)", line)
        stamp = re.match(r"\d+,\d+,(\d+),", line)
        if match:
            age = now - int(stamp[1]) / 1e6 if stamp else 0.0
            text = line.partition(";")[2].splitlines() or [line.strip()]
            yield XidLine(int(match[2]), match[1].lower(), max(age, 0.0), text[0])
