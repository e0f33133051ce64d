"""A worker that ignores all signals except SIGKILL: prints "ready RANK PID", then "got SIGNAL RANK" for each signal."""

import os
import signal
import time

rank = os.environ.get("RANK", "0")


def on_signal(number, frame):
    print(f"got {signal.Signals(number).name} {rank}\n", end="", flush=True)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, on_signal)
print(f"ready {rank} {os.getpid()}\n", end="", flush=True)
while True:
    time.sleep(600)
