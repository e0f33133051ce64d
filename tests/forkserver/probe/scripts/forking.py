"""A plain script that forks all the time, takes signals for itself, and becomes another program. forking.py FOLDER"""

import os
import pathlib
import signal
import sys
import time

FOLDER = pathlib.Path(sys.argv[1])


def stand(name):
    """In one place, until the test has looked."""
    (FOLDER / name).touch()
    os.read(0, 1)


child = os.fork()
if child == 0:
    while not (FOLDER / "end").exists():
        time.sleep(0.01)
    sys.exit()  # not by os._exit: what was registered for the end is run
(FOLDER / "child").write_text(str(child))
stand("forked")
os.wait()

end = time.monotonic() + 1.0
while time.monotonic() < end:
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    time.sleep(0.02)
stand("often")

signal.signal(signal.SIGRTMIN + 7, lambda *_: None)
stand("deaf")
os.execv(sys.executable, [sys.executable, "-c", f"import os; open({str(FOLDER / 'other')!r}, 'w'); os.read(0, 1)"])
