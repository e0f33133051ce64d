"""What may be done from the screen. Who watches can change nothing by itself: it is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RunActions(Protocol):
    def debugger(self, rank: int) -> Sequence[str]:
        """The command that debugs a rank, on the terminal that it is given."""
        ...

    def stop(self) -> None:
        """The run, as a SIGTERM would. Does not wait. Raises PhalanxError."""
        ...

    def end_now(self) -> None:
        """The same, without any grace: what two Ctrl-C are to `phalanx run`."""
        ...
