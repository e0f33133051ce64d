"""left.py HOW FOLDER [--code N] [--ignore-term]: rank 1 leaves a process running, and says "left 1 PID".

It continues until FOLDER/go is there, then writes FOLDER/finished. Every rank exits with N.

HOW  session  in its own session
     group    in the session of its rank
     daemon   forked twice, without exec
     pipe     one that ends a moment after its rank, whose pipe it reads
     helper   a DataLoader's worker, whose rank does not end it
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("how")
parser.add_argument("folder")
parser.add_argument("--code", type=int, default=0)
parser.add_argument("--ignore-term", action="store_true")
args = parser.parse_args()


def work() -> None:
    while not os.path.exists(f"{args.folder}/go"):
        time.sleep(0.01)
    print("finished", flush=True)
    with open(f"{args.folder}/finished", "w"):
        pass


def leave() -> int:
    if args.how == "daemon":
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            child = os.fork()
            if child == 0:
                work()
            else:
                os.write(write, b"%d" % child)
            os._exit(0)
        return int(os.read(read, 20))
    ignore = 'trap "" TERM;' if args.ignore_term else ""
    loop = f"{ignore} while ! test -e {args.folder}/go; do sleep 0.01; done; echo finished; : > {args.folder}/finished"
    return subprocess.Popen(["sh", "-c", loop], start_new_session=args.how == "session").pid


if args.how == "helper":
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(1000), num_workers=1))
    next(batches)
    print("done\n", end="", flush=True)
    os._exit(0)
if args.how == "pipe":
    read, _ = os.pipe()  # the other end is open as long as this process
    subprocess.Popen(["sh", "-c", "read line; sleep 0.1"], stdin=read)
    os.close(read)
elif os.environ["RANK"] == "1":
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"left 1 {leave()}\n", end="", flush=True)
sys.exit(args.code)
