"""The folder of the scripts of the end-to-end tests, and parsers of their output."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.handle import Handle

SCRIPTS = Path(__file__).parent / "scripts"

READY = re.compile(r"ready (\d+) (\d+)")
CHILD = re.compile(r"child (\d+) (\d+)")


def script(name: str) -> str:
    return str(SCRIPTS / name)


def pids(job: Handle, pattern: re.Pattern[str], count: int) -> list[int]:
    """Return the pids of the processes that have printed them so far, in rank order."""
    found = {(int(match[1]), int(match[2])) for match in job.wait_for(pattern, count)}
    return [pid for _, pid in sorted(found)]
