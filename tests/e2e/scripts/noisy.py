"""noisy.py [--mb N] [--stream out|err|both]: N million bytes of numbered lines, then "end RANK LINES"."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--mb", type=float, default=1)
parser.add_argument("--stream", choices=["out", "err", "both"], default="out")
args = parser.parse_args()
rank = os.environ.get("RANK", "0")

streams = {"out": [sys.stdout], "err": [sys.stderr], "both": [sys.stdout, sys.stderr]}[args.stream]
length = 100
lines = int(args.mb * 1e6 / length)
for number in range(lines):
    line = f"rank {rank} line {number:08d} ".ljust(length - 1, "x") + "\n"
    for stream in streams:
        stream.write(line)
for stream in streams:
    stream.write(f"end {rank} {lines}\n")
