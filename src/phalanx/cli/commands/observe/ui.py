"""`phalanx ui`: shows all runs of this machine in a browser, live and ended."""

from __future__ import annotations

import argparse

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import PAGE_KEY
from phalanx.launcher.runs import run_folder
from phalanx.launcher.viewers.run_list import LocalRunList
from phalanx.watch.page import address, keys, runs_server


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx ui`."""
    parser = argparse.ArgumentParser(
        prog="phalanx ui",
        description="Serve a browser page with all runs of this machine until Ctrl-C, and print its link: live and "
        "ended runs, to open, filter, compare and delete.",
    )
    parser.add_argument(
        "--page-at",
        metavar="HOST[:PORT]",
        help="address of the page (default: 127.0.0.1, a free port); runs can be deleted only on loopback",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx ui`. Return the exit code."""
    options = make_parser().parse_args(argv)
    environ = environment()
    runs = LocalRunList(run_folder.home(environ), read_only=not address.parse(options.page_at).loopback)
    return runs_server.serve(runs, options.page_at, keys.new(environ.get(PAGE_KEY, "")))
