"""The environment of this process."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """Return a copy of the environment."""
    return dict(os.environ)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
