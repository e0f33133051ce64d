"""A plain script that forks all the time, handles signals itself, and executes another program. forking.py FOLDER"""

import os
import pathlib
import signal
import sys
import time

FOLDER = pathlib.Path(sys.argv[1])


def stand(name):
    """Stay at one place until the test has sampled it."""
    (FOLDER / name).touch()
    os.read(0, 1)


child = os.fork()
if child == 0:
    while not (FOLDER / "end").exists():
        time.sleep(0.01)
    sys.exit()  # unlike os._exit, this runs the atexit functions
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
