"""Detects whether a process that serves the workers still answers: the fork server, or the store."""

from __future__ import annotations

import math

INTERVAL = 1.0  # seconds between two checks
STOPPED = 10.0  # seconds for which a process may be stopped (SIGSTOP)
IMPORT_TIMEOUT = 600.0  # seconds for imports that are known to end: others have done the same


class Liveness:
    """Counts the seconds without an answer of a process. Call `record_answer` at each answer, `look` every `INTERVAL`.

    It counts calls and reads no clock, so that a pause of the whole machine, or of all processes of a job, does not
    count. Before its first answer the process imports, for at most `start` seconds.
    """

    def __init__(self, timeout: float, *, start: float = math.inf) -> None:
        self._timeout = timeout
        self._start = start
        self._answered = False
        self._silent = 0.0
        self._stopped = 0.0

    @property
    def answered(self) -> bool:
        """Return whether it has ever answered."""
        return self._answered

    def record_answer(self) -> None:
        """Record an answer."""
        self._answered = True
        self._silent = 0.0

    def look(self, state: str) -> str:
        """Return why the process should be replaced, given its state (`linux.state`). Empty: it should not."""
        self._silent += INTERVAL
        self._stopped = self._stopped + INTERVAL if state == "stopped" else 0.0
        if self._stopped >= min(self._timeout, STOPPED):
            return f"stopped for {self._stopped:.0f} s"
        # A running process may be slow: on a loaded machine, or while it ends many processes.
        if self._silent > (max(self._timeout, 2 * STOPPED) if self._answered else self._start):
            return f"no answer for {self._silent:.0f} s ({state})"
        return ""
