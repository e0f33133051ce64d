"""An exception in a thread does not end the script; threading.excepthook and sys.unraisablehook are called."""

import os
import threading


def fails():
    raise LookupError("in a thread")


class Unraisable:
    def __del__(self):
        raise TypeError("in a destructor")


thread = threading.Thread(target=fails, name="loader")
thread.start()
thread.join()
Unraisable()
print("continues", os.environ["RANK"])
