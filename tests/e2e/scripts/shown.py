"""Prints a line, and lives until the file of the first argument exists."""

import os
import sys
import time

print(f"ready {os.environ['RANK']} {os.getpid()}", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("done", flush=True)
