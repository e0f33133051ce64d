"""`phalanx warm`: keeps a warm fork server for the next run; `--stop` ends it."""

from __future__ import annotations

import argparse
import os
import sys
import time

from phalanx.cli.options.values import duration
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import THREADS
from phalanx.errors import LaunchError, OptionError
from phalanx.launcher.forking import warm_pool
from phalanx.launcher.runs import run_folder


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx warm`."""
    parser = argparse.ArgumentParser(
        prog="phalanx warm",
        description="Keep a fork server with torch imported, for the next `phalanx run` with this interpreter, these "
        "packages and this environment. It ends when it has not been used for a while.",
    )
    parser.add_argument("--for", dest="idle", default="15m", metavar="TIME", help="end after this long unused (15m)")
    parser.add_argument("--preload", default="", metavar="A,B", help="modules to import as well")
    parser.add_argument("--list", action="store_true", help="list warm fork servers")
    parser.add_argument("--stop", action="store_true", help="end warm fork servers; runs that use one continue")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx warm`. Return the exit code."""
    options = make_parser().parse_args(argv)
    environ = environment()
    base = run_folder.home(environ)
    if options.stop:
        return _stop(base)
    if options.list:
        return _list(base)
    # Workers of a run use one thread each by default, and torch reads that number at import.
    environ.setdefault(THREADS, "1")
    python = environ.get("PYTHON_EXEC", sys.executable)
    modules = [*warm_pool.MODULES, *filter(None, options.preload.split(","))]
    return _start(warm_pool.place(base, python, environ), python, environ, modules, _seconds(options.idle))


def _seconds(text: str) -> float:
    try:
        return duration(text)
    except ValueError as error:
        raise OptionError(f'--for is "{text}": {error}', fix="phalanx warm --for 15m") from None


def _start(place: warm_pool.WarmPool, python: str, environ: dict[str, str], modules: list[str], idle: float) -> int:
    if warm_pool.status(place.socket) is not None:
        sys.stdout.write("warm already\n")
        return 0
    start = time.monotonic()
    warm_pool.start(place, python, environ, modules, idle)
    answer = warm_pool.status(place.socket)
    if answer is None:
        with open(place.log, errors="replace") as file:
            lines = file.read().strip().splitlines()
        raise LaunchError("nothing could be kept warm", details=lines[-3:] or [f"see {place.log}"])
    took = time.monotonic() - start
    sys.stdout.write(f"warm after {took:.1f} s (pid {answer['pid']}), until unused for {idle / 60:.0f} min\n")
    return 0


def _list(base: str) -> int:
    found = [answer for path in warm_pool.sockets(base) if (answer := warm_pool.status(path)) is not None]
    for answer in found:
        use = f"{answer['runs']} run{'s' if answer['runs'] != 1 else ''}" if answer["runs"] else "idle"
        sys.stdout.write(f"pid {answer['pid']}  {use}  ends when unused for {answer['idle'] / 60:.0f} min\n")
    if not found:
        sys.stdout.write("nothing is warm\n")
    return 0


def _stop(base: str) -> int:
    stopped = 0
    for path in warm_pool.sockets(base):
        answer = warm_pool.stop(path)
        if answer is None:
            os.unlink(path)  # the process that created it was killed
            continue
        stopped += 1
        if answer["runs"]:
            sys.stdout.write(f"{answer['runs']} running; it ends after them\n")
    sys.stdout.write(f"{stopped} ended\n" if stopped else "nothing was warm\n")
    return 0
