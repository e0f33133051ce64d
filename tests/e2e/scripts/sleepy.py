"""sleepy.py [--ignore-term] [--children] [--seconds N]: say "ready RANK PID", then sleep.

--ignore-term  SIGTERM, SIGINT and SIGHUP do nothing
--children     with two loader processes and a process in its own session: "child RANK PID" for each
"""

import argparse
import os
import signal
import subprocess
import time

parser = argparse.ArgumentParser()
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--children", action="store_true")
parser.add_argument("--seconds", type=float, default=600)
args = parser.parse_args()
rank = os.environ.get("RANK", "0")

if args.ignore_term:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

if args.children:
    import multiprocessing

    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(1000), num_workers=2))
    next(batches)
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for pid in (own.pid, *(child.pid for child in multiprocessing.active_children())):
        print(f"child {rank} {pid}\n", end="", flush=True)

print(f"ready {rank} {os.getpid()}\n", end="", flush=True)
time.sleep(args.seconds)
print(f"slept {rank}\n", end="", flush=True)
