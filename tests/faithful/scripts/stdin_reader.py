"""Rank 0 reads standard input to its end."""

import os
import sys

if os.environ["RANK"] == "0":
    first = sys.stdin.readline()
    print(repr(first), sum(int(line) for line in sys.stdin))
print(sys.stdin.isatty(), sys.stdin.encoding, sys.stdin.fileno())
