"""Workers that do not leave their group."""

from __future__ import annotations

import subprocess
import time

from phalanx.launcher.workers.regroup.unresponsive import Unresponsive


def test_time_in_which_this_process_was_busy_does_not_count() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            unresponsive, until = Unresponsive(), time.monotonic() + 20
            while not unresponsive.among([process.pid], 0.05):  # once it sleeps, it is never seen to compute
                assert time.monotonic() < until
                time.sleep(0.01)
            unresponsive.excuse(-1.0)
            assert unresponsive.among([process.pid], 0.05) == [process.pid]
            unresponsive.excuse(100.0)  # it may have answered long ago
            assert unresponsive.among([process.pid], 0.05) == []
        finally:
            process.kill()
