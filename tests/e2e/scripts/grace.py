"""Takes some time to save its state when it must stop."""

import os
import signal
import sys
import time

rank = os.environ["RANK"]


def on_signal(number: int, _: object) -> None:
    print(f"rank {rank} got {signal.Signals(number).name}", flush=True)
    if number == signal.SIGTERM:
        time.sleep(1)
        print(f"rank {rank} saved", flush=True)
        sys.exit(0)


signal.signal(signal.SIGUSR1, on_signal)
signal.signal(signal.SIGTERM, on_signal)
print("ready", flush=True)
while True:
    time.sleep(60)
