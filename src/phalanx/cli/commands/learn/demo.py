"""`phalanx demo`: runs a training that succeeds, and one in which a rank fails."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from phalanx import demo
from phalanx.cli.commands.run import run
from phalanx.errors import OptionError

_SCRIPTS = os.path.dirname(os.path.abspath(demo.__file__))
_ENOUGH = "95"  # accuracy in percent


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx demo`."""
    parser = argparse.ArgumentParser(
        prog="phalanx demo", description="Show a training that succeeds and one that fails, in a few seconds."
    )
    parser.add_argument("-g", "--slots", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx demo`. Return 0 if the demo went as expected."""
    ranks = make_parser().parse_args(argv).slots
    if ranks < 2:
        raise OptionError(f"-g {ranks}: the demo needs 2 ranks or more", fix="phalanx demo -g 2")
    code, took = _run(ranks, "digits.py", "--at-least", _ENOUGH)
    if code:
        return code
    sys.stdout.write(f"\nfrom command to trained model in {took:.1f} s\n\nNow rank 1 raises an error:\n")
    code, _ = _run(ranks, "broken.py")
    sys.stdout.write(
        f"\nphalanx names the root cause, stops the other ranks, and exits with the code of the failed rank: {code}\n"
    )
    return 0 if code == 1 else 1


def _run(ranks: int, script: str, *args: str) -> tuple[int, float]:
    path = os.path.join(_SCRIPTS, script)
    near = os.path.relpath(path)
    words = ["-g", str(ranks), "--cpu", path if near.startswith(os.pardir) else near, *args]
    sys.stdout.write(f"\n$ phalanx run {shlex.join(words)}\n")
    sys.stdout.flush()
    start = time.monotonic()
    return run.main(words), time.monotonic() - start
