"""A process that is killed."""

import os
import signal

print("begins")
os.kill(os.getpid(), signal.SIGKILL)
