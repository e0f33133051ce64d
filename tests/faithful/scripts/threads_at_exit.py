"""Threads that outlive the main thread: the interpreter waits for non-daemon threads."""

import os
import threading

rank = os.environ["RANK"]
local = threading.local()
local.name = "main"
go = threading.Event()


def writer():
    go.wait()
    threading.main_thread().join()
    print("after main:", hasattr(local, "name"), threading.current_thread().name)
    with open(f"thread-{rank}.txt", "w") as file:
        file.write("written after the main thread\n")


def endless():
    threading.Event().wait()


threading.Thread(target=endless, daemon=True).start()
threading.Thread(target=writer, name="writer").start()
print(local.name, threading.active_count(), [t.name for t in threading.enumerate()])
go.set()
