"""Whether the nodes agree on the time of day."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import seconds

CHECK = "clock"
_OFF = 1.0
_FAR_OFF = 300.0  # from about here on, certificates and tickets are rejected


@dataclass(frozen=True)
class Offset:
    """How far the clock of a node is ahead of the first node's clock, with a tolerance of `error`."""

    ahead: float
    error: float


def best(samples: list[tuple[float, float, float]]) -> Offset | None:
    """Return the offset from the fastest of the samples (sent, their time, received)."""
    if not samples:
        return None
    sent, theirs, received = min(samples, key=lambda sample: sample[2] - sample[0])
    # The samples give the peer's clock relative to ours. Negate them: how far ours is ahead.
    return Offset(ahead=(sent + received) / 2 - theirs, error=(received - sent) / 2)


def judge(offsets: Mapping[str, Offset]) -> list[Finding]:
    """Return findings about clocks. Each is compared with the median."""
    if len(offsets) < 2:
        return []
    middle = statistics.median_low([offset.ahead for offset in offsets.values()])
    found: list[Finding] = []
    for node, offset in offsets.items():
        off = offset.ahead - middle
        certain = abs(off) - offset.error
        if certain <= _OFF:
            continue
        found.append(
            Finding(
                CHECK,
                "red" if certain > _FAR_OFF else "yellow",
                f"the clock is {seconds(abs(off))} {'ahead of' if off > 0 else 'behind'} the others",
                "it is not synchronized; times in logs of different nodes do not match, and files appear to be from "
                "the future",
                "timedatectl set-ntp true   (or: chronyc makestep)",
                node,
            )
        )
    if not found:
        most = max(abs(offset.ahead - middle) for offset in offsets.values())
        found.append(Finding(CHECK, "green", f"clocks are within {seconds(most)} of each other"))
    return found
