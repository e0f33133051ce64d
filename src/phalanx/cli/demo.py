"""`phalanx demo`: a training that works, and one in which a rank fails, as a user would see them."""

from __future__ import annotations

import argparse
import os
import sys
import time

from phalanx import demo
from phalanx.cli import run

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(demo.__file__)), "digits.py")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx demo", description="See it work, in a few seconds.")
    parser.add_argument("-g", "--slots", type=int, default=2, metavar="N", help="ranks (2)")
    options = parser.parse_args(argv)
    ranks = [f"-g{options.slots}", "--cpu"]
    code, took = _run([*ranks, _SCRIPT])
    if code:
        return code
    sys.stdout.write(f"\nfrom command to trained model in {took:.1f} s\n\nNow rank 1 meets an error:\n")
    code, took = _run([*ranks, _SCRIPT, "--fail"])
    sys.stdout.write(
        f"\nThe first cause is named, the others are stopped, and the exit code is the failing rank's: {code}\n"
    )
    return 0 if code == 1 else 1


def _run(argv: list[str]) -> tuple[int, float]:
    sys.stdout.write(f"\n$ phalanx run {' '.join(argv)}\n")
    sys.stdout.flush()
    start = time.monotonic()
    return run.main(argv), time.monotonic() - start
