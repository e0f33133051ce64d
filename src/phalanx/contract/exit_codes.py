"""The meaning of the exit code of a run."""

from __future__ import annotations

import os

_STOPPED_BY = {130: "Ctrl-C", 143: "SIGTERM"}  # 128 plus the number of the signal
PREEMPTED = os.EX_TEMPFAIL  # exit code of a preempted run; a script may exit with it, too


def stopped_by(code: int | None) -> str:
    """Return who stopped a run with this exit code: "Ctrl-C" or "SIGTERM". Empty: it ended in another way."""
    return _STOPPED_BY.get(code, "") if code is not None else ""
