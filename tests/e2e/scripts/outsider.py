"""A rank of any launcher: prints a line, and sleeps; with `fails`, rank 1 raises."""

import os
import sys
import time


def linger() -> None:
    print("here", os.environ.get("RANK", os.environ.get("SLURM_PROCID")), flush=True)
    time.sleep(600)


def fail() -> None:
    raise ValueError("no such sample")


if "fails" in sys.argv and os.environ["RANK"] == "1":
    fail()
linger()
