"""`phalanx stop RUN`: ends a run, and waits until all its processes have ended."""

from __future__ import annotations

import argparse
import select
import signal
import sys
import time

from phalanx.cli import run_lookup
from phalanx.contract.visible import visible_line
from phalanx.errors import LaunchError

_DELIVERED = 5.0  # seconds to wait until a signal is delivered: the agent may be stopped (SIGSTOP)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx stop`."""
    parser = argparse.ArgumentParser(
        prog="phalanx stop", description="End a run: let workers shut down after SIGTERM, or end them at once."
    )
    parser.add_argument("run", nargs="?", help="name from `phalanx ps`, or a prefix of it")
    parser.add_argument("--now", action="store_true", help="do not wait for workers to shut down")
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="how long to wait (default: 60)")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx stop`. Return the exit code."""
    options = make_parser().parse_args(argv)
    run = run_lookup.find_running(options.run, verb="stop")
    with run_lookup.agent_handle(run) as process:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if options.now:
            # SIGTERM asks the agent to stop. A SIGINT after it ends the workers at once, and the agent still cleans up.
            # The kernel may deliver two pending signals in the wrong order.
            _wait_until_delivered(run.pid, signal.SIGTERM)
            signal.pidfd_send_signal(process, signal.SIGINT)
        ready, _, _ = select.select([process], [], [], options.timeout)
    if not ready:
        raise LaunchError(f"{run.id} has not ended after {options.timeout:.0f} s", fix=f"phalanx stop --now {run.id}")
    sys.stdout.write(f"{visible_line(run.id)} ended\n")
    return 0


def _wait_until_delivered(pid: int, number: signal.Signals) -> None:
    limit = time.monotonic() + _DELIVERED
    while _is_pending(pid, number) and time.monotonic() < limit:
        time.sleep(0.001)


def _is_pending(pid: int, number: signal.Signals) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)
