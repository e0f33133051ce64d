"""until_file.py FILE: say "ready RANK PID", and end once the file is there. Needs no torch."""

import os
import sys
import time

rank = os.environ["RANK"]
print(f"ready {rank} {os.getpid()}\n", end="", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print(f"done {rank}\n", end="", flush=True)
