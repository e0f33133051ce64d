"""loud.py RANK LINES: that rank writes this many lines of 100 bytes; every rank prints "end RANK". Needs no torch."""

import os
import sys

rank = os.environ["RANK"]
if rank == sys.argv[1]:
    for number in range(int(sys.argv[2])):
        sys.stdout.write(f"line {number:08d} ".ljust(99, "x") + "\n")
print(f"end {rank}\n", end="", flush=True)
