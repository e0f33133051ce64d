"""ends_late.py HOW FOLDER [CODE]: the process of rank 1 does not end with its last line.

HOW  thread    a thread continues until FOLDER/go is there
     atexit    so does an atexit function
     child     so does a child process that multiprocessing waits for
     teardown  a destructor that only the teardown of the interpreter calls waits forever, with Python's lock
     busy      so does one that computes, until FOLDER/go is there

CODE 1 is that of an exception.
"""

import atexit
import ctypes
import multiprocessing
import os
import sys
import threading
import time

how, folder = sys.argv[1:3]


def work() -> None:
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)


class Hangs:
    def __del__(self, libc=ctypes.PyDLL(None), room=ctypes.create_string_buffer(64)) -> None:  # noqa: B008
        libc.sem_init(room, 0, 0)
        libc.sem_wait(room)


class Computes:
    def __del__(self, exists=os.path.exists, path=f"{folder}/go") -> None:
        while not exists(path):
            pass


if os.environ["RANK"] == "1":
    if how == "thread":
        threading.Thread(target=work, name="uploader").start()
    elif how == "atexit":
        atexit.register(work)
    elif how == "child":
        multiprocessing.get_context("fork").Process(target=work).start()
    elif how == "teardown":
        sys.modules["kept"] = Hangs()  # type: ignore[assignment]
    elif how == "busy":
        sys.modules["kept"] = Computes()  # type: ignore[assignment]
    print(f"last line {time.time()}\n", end="", flush=True)
    if len(sys.argv) > 3:
        raise RuntimeError("on purpose")
