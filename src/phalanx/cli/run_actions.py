"""Actions on a run that its terminal view offers: the same as commands from another terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from phalanx.cli.run_lookup import agent_handle
from phalanx.launcher.runs.run_folder import RunRecord

_PAUSE = 0.3  # seconds between two signals: the kernel merges two pending signals of the same number


class LocalRunActions:
    """Stops a run on this machine, or starts a debugger in it."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run

    def debugger(self, rank: int) -> Sequence[str]:
        """Return the command that attaches a debugger to a rank."""
        return sys.executable, "-P", "-m", "phalanx", "attach", str(rank), self._run.id

    def stop(self) -> None:
        """Ask the run to stop, as `phalanx stop` does."""
        with agent_handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGTERM)

    def interrupt(self) -> None:
        """Ask the run to stop, as Ctrl-C in its terminal does."""
        with agent_handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGINT)

    def end_now(self) -> None:
        """End the run at once, as pressing Ctrl-C twice does."""
        with agent_handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGINT)
            time.sleep(_PAUSE)
            signal.pidfd_send_signal(process, signal.SIGINT)
