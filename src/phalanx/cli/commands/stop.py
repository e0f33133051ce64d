"""`phalanx stop RUN`: end a run, and wait until nothing of it is left."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

from phalanx.cli import choice
from phalanx.errors import LaunchError, UsageError
from phalanx.launch.runs.run_folder import RunRecord


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx stop", description="End a run: SIGTERM with grace, or at once.")
    parser.add_argument("run", nargs="?", help="its id as `phalanx ps` shows it, or the beginning of it")
    parser.add_argument("--now", action="store_true", help="do not let workers finish what they are doing")
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="how long to wait (60)")
    options = parser.parse_args(argv)
    run = choice.running(options.run, verb="stop")
    with handle(run) as process:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if options.now:
            # The first says "stop", a SIGINT after it says "at once": the agent still tidies up.
            signal.pidfd_send_signal(process, signal.SIGINT)
        ready, _, _ = select.select([process], [], [], options.timeout)
    if not ready:
        raise LaunchError(f"{run.id} has not ended after {options.timeout:.0f} s", fix=f"phalanx stop --now {run.id}")
    sys.stdout.write(f"{run.id} ended\n")
    return 0


@contextlib.contextmanager
def handle(run: RunRecord) -> Iterator[int]:
    """A descriptor of the very process: a pid could be somebody else's by the time the signal is sent."""
    try:
        process = os.pidfd_open(run.pid)
    except ProcessLookupError:
        raise UsageError(f"{run.id} has ended already", fix="phalanx ps") from None
    try:
        if not run.alive:
            raise UsageError(f"{run.id} has ended already", fix="phalanx ps")
        yield process
    finally:
        os.close(process)
