"""What people may do to a run from its screen: the same as from another terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from phalanx.cli.commands.stop import handle
from phalanx.launch.runs.run_folder import RunRecord

_MOMENT = 0.3  # seconds between two signals: two of a kind that wait are one


class LocalRunActions:
    def __init__(self, run: RunRecord) -> None:
        self._run = run

    def debugger(self, rank: int) -> Sequence[str]:
        return sys.executable, "-P", "-m", "phalanx", "attach", str(rank), self._run.id

    def stop(self) -> None:
        with handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGTERM)

    def end_now(self) -> None:
        """What two Ctrl-C are to `phalanx run`."""
        with handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGINT)
            time.sleep(_MOMENT)
            signal.pidfd_send_signal(process, signal.SIGINT)
