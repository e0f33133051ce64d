"""Logging of phalanx itself: the standard `logging`, under the name `phalanx`, enabled by PHALANX_LOG.

    PHALANX_LOG=debug phalanx run train.py

Agents and workers write to their standard error, so a worker's lines are in its log file. Without the variable nothing
is configured, and the fork server does not import `logging`, so that the script finds it unchanged.
"""

from __future__ import annotations

import os
import sys
from typing import Any

VARIABLE = "PHALANX_LOG"
LEVELS = ("debug", "info", "warning", "error")
_HANDLER = "CurrentStandardError"
FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


def configure(level: str | None = None) -> str | None:
    """Send phalanx's log to standard error. Return an error message if the level is invalid, else None.

    Default level: PHALANX_LOG. If that is not set either, remove the configuration of a parent process.
    """
    level = os.environ.get(VARIABLE, "") if level is None else level
    if not level:
        _reset()
        return None
    if level.lower() not in LEVELS:
        return f"{VARIABLE} is {level!r}, expected one of {', '.join(LEVELS)}"
    import logging

    class CurrentStandardError(logging.StreamHandler[Any]):
        """Writes to the current `sys.stderr`: a forked worker has its own."""

        @property
        def stream(self) -> Any:
            return sys.stderr

        @stream.setter
        def stream(self, value: Any) -> None:
            pass

    logger = logging.getLogger("phalanx")
    if not any(type(handler).__name__ == _HANDLER for handler in logger.handlers):
        handler = CurrentStandardError()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())
    return None


def _reset() -> None:
    """Remove our handler: a warm fork server may have one that this run does not want."""
    logging = sys.modules.get("logging")
    loggers = {} if logging is None else logging.Logger.manager.loggerDict
    logger: Any = loggers.get("phalanx")
    for handler in [*getattr(logger, "handlers", ())]:
        if type(handler).__name__ == _HANDLER:
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel("NOTSET")


def swallowed(where: str) -> None:
    """Log the exception being handled, which is not raised further, at level debug. `where` names the module."""
    if os.environ.get(VARIABLE):
        try:
            import logging  # a script may have a module of that name, or may have ended already

            logging.getLogger(f"phalanx.{where}").debug("ignored exception", exc_info=True)
        except Exception:  # reporting an ignored exception must not raise another
            return
