"""Paths of the benchmarks and of the scripts that they start."""

from __future__ import annotations

import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # contains the folder `benchmarks`
SCRIPTS = os.path.join(ROOT, "benchmarks", "scripts")


def script(name: str) -> str:
    """Return the path of the script `name`, which every launcher can run."""
    return os.path.join(SCRIPTS, name)
