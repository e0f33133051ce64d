"""The calls that the tests of the shm engine use, and the errors they raise."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.collectives.engines.engine import Reduction

SUM = Reduction()


def raised(what: Callable[[], object]) -> tuple[str, str]:
    try:
        what()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
