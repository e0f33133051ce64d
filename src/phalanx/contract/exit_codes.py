"""What the exit code of a run says. The page has the same table (watch/page/assets/format.js)."""

from __future__ import annotations

_STOPPED_BY = {130: "Ctrl-C", 143: "SIGTERM"}  # 128 plus the number of the signal


def stopped_by(code: int | None) -> str:
    """Return who stopped a run with this exit code: "Ctrl-C" or "SIGTERM". Empty: it ended in another way."""
    return _STOPPED_BY.get(code, "") if code is not None else ""
