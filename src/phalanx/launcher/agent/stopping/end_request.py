"""The request to end a run before its workers have finished."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from phalanx.errors import PhalanxError


@dataclass
class EndRequest:
    """The first signal or error that ends a run before its workers have finished. Neither is set until then."""

    signal: signal.Signals | None = None
    error: PhalanxError | None = None

    @property
    def made(self) -> bool:
        """Return whether the run must end."""
        return self.signal is not None or self.error is not None

    def raise_error(self) -> None:
        """Raise the error that ends the run, if there is one."""
        if self.error is not None:
            raise self.error

    def exit_code(self, otherwise: PhalanxError) -> int:
        """Return the exit code of a run that a signal has ended. Raises the error that has ended it, or `otherwise`."""
        self.raise_error()
        if self.signal is None:
            raise otherwise
        return 128 + self.signal
