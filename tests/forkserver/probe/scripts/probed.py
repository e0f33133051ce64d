"""A plain script that looks for its probe, forks, and closes unknown descriptors. probed.py FOLDER"""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import time

FOLDER = pathlib.Path(sys.argv[1])


def look():
    return {
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": [thread.name for thread in threading.enumerate()],
        "environ": dict(os.environ),
        "path": sys.path,
    }


def child(name):
    (FOLDER / name).write_text(json.dumps(look()))


def wait_for(name):
    """Wait while the test queries the probe."""
    (FOLDER / f"at {name}").touch()
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def main():
    child("worker")
    if os.fork() == 0:
        child("forked")
        os._exit(0)
    os.wait()
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
    listing = f"import os, json; json.dump(os.listdir('/proc/self/fd'), open({str(FOLDER / 'executed')!r}, 'w'))"
    subprocess.run([sys.executable, "-c", listing], check=True, close_fds=False)
    other = threading.Thread(target=wait_for, args=["reported"], name="the other")
    other.start()
    wait_for("reported")
    other.join()
    os.closerange(3, 65536)
    taken = [os.dup(0) for _ in range(8)]
    again = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    wait_for("closed")
    (FOLDER / "left").write_text(json.dumps([os.fstat(fd).st_rdev for fd in taken + again]))


if __name__ == "__main__":
    main()
