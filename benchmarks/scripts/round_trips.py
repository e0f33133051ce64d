"""round_trips.py PORT CLIENTS SECONDS: how often clients of the store at PORT set or get a value in that time."""

import os
import sys
import time

from torch.distributed import TCPStore

port, clients, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def count(number: int) -> int:
    """Return how often this client sets or gets a value."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        store.set(f"bench/{number}", "value")
        store.get(f"bench/{number}")
        done += 2
    return done


pipes = []
for number in range(clients):  # forked, so that torch is imported once
    theirs, ours = os.pipe()
    if os.fork() == 0:
        os.write(ours, str(count(number)).encode())
        os._exit(0)
    os.close(ours)
    pipes.append(theirs)
sys.stdout.write(f"{sum(int(os.read(pipe, 20) or b'-1') for pipe in pipes)}\n")
