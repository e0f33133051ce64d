"""`phalanx watch [RUN]`: shows a run, live or ended, in this terminal or in a browser."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from phalanx.cli import run_lookup
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import PAGE_KEY
from phalanx.forkserver import linux
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.launcher.viewers import dashboard, views
from phalanx.watch.page import keys

_PAUSE = 0.3  # seconds between two signals: the kernel merges two pending signals of the same number


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx watch`."""
    parser = argparse.ArgumentParser(
        prog="phalanx watch", description="Show a run, live or ended. Watching does not affect the run."
    )
    parser.add_argument("run", nargs="?", help="name from `phalanx ps`, or a prefix of it (default: the last run)")
    parser.add_argument("--page", action="store_true", help="serve a browser page until Ctrl-C, and print its link")
    parser.add_argument(
        "--page-at", metavar="HOST[:PORT]", help="address of the page (default: 127.0.0.1, a free port)"
    )
    parser.add_argument("--plain", action="store_true", help="print lines instead of a full-screen view, as in a pipe")
    parser.add_argument("--page-fd", type=int, help=argparse.SUPPRESS)  # a socket that `phalanx run` has opened
    parser.add_argument("--held", type=int, help=argparse.SUPPRESS)  # pid of the `phalanx run` that holds this viewer
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx watch`. Return the exit code."""
    options = make_parser().parse_args(argv)
    if options.held is not None:
        linux.die_with_parent(options.held, signal.SIGTERM if options.page_fd is None else signal.SIGKILL)
    run = (
        run_lookup.find(options.run, verb="watch")
        if options.held is None
        else run_lookup.find_by_pid(options.held, options.run)
    )
    source = views.of(run)
    if options.page or options.page_at or options.page_fd is not None:
        from phalanx.watch.page import server

        key = keys.new(environment().get(PAGE_KEY, "")) if options.page_fd is None else dashboard.key_of(run.folder)
        return server.serve(source, at=options.page_at, fd=options.page_fd, key=key)
    from phalanx.watch.screen.terminal import terminal

    environ = environment()
    if options.plain or not terminal.supports_screen(environ.get("TERM", "")):
        from phalanx.watch.screen import lines

        return lines.show(source)
    from phalanx.watch.screen import screen

    return screen.show(source, actions=LocalRunActions(run), environ=environ, owned_by_run=options.held is not None)


class LocalRunActions:
    """Actions that the terminal view offers for a run on this machine: the same as commands from another terminal."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run

    def debugger(self, rank: int) -> Sequence[str]:
        """Return the command that attaches a debugger to a rank."""
        return sys.executable, "-P", "-m", "phalanx", "attach", str(rank), self._run.id

    def stop(self) -> None:
        """Ask the run to stop, as `phalanx stop` does."""
        with run_lookup.agent_handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGTERM)

    def interrupt(self) -> None:
        """Ask the run to stop, as Ctrl-C in its terminal does."""
        with run_lookup.agent_handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGINT)

    def end_now(self) -> None:
        """End the run at once, as pressing Ctrl-C twice does."""
        with run_lookup.agent_handle(self._run) as process:
            signal.pidfd_send_signal(process, signal.SIGINT)
            time.sleep(_PAUSE)
            signal.pidfd_send_signal(process, signal.SIGINT)
