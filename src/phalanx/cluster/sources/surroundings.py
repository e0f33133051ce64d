"""What this process was given by whoever started it."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """A copy: nothing that phalanx does changes its own environment."""
    return dict(os.environ)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))
