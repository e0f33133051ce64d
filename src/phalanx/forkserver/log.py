"""Logging of phalanx itself: the standard `logging`, under the name `phalanx`, switched on by PHALANX_LOG.

    PHALANX_LOG=debug phalanx run train.py

Agents and workers write to their standard error; a worker's lines are therefore in its log file. Without the variable
nothing is configured, and the fork server does not even import `logging`: a script finds it as Python left it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

VARIABLE = "PHALANX_LOG"
LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


def configure(level: str | None = None) -> str | None:
    """Send the log of phalanx to standard error; return what is wrong with the level, if anything.

    The level is PHALANX_LOG where none is given. Does nothing where that is not set either.
    """
    level = os.environ.get(VARIABLE, "") if level is None else level
    if not level:
        return None
    if level.lower() not in LEVELS:
        return f"{VARIABLE} is {level!r}, expected one of {', '.join(LEVELS)}"
    import logging

    class CurrentStandardError(logging.StreamHandler[Any]):
        """Writes to whatever `sys.stderr` is at that time: a forked worker has its own."""

        @property
        def stream(self) -> Any:
            return sys.stderr

        @stream.setter
        def stream(self, value: Any) -> None:
            pass

    logger = logging.getLogger("phalanx")
    if not any(type(handler).__name__ == CurrentStandardError.__name__ for handler in logger.handlers):
        handler = CurrentStandardError()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())
    return None


def swallowed(where: str) -> None:
    """Log, at level debug, an exception that is being handled and goes no further. `where` names the module."""
    if os.environ.get(VARIABLE):
        import logging

        logging.getLogger(f"phalanx.{where}").debug("ignored exception", exc_info=True)
