"""One rank raises an exception while the other waits silently."""

import os
import time

if os.environ["RANK"] == "1":
    print("rank 1 fails")
    raise ZeroDivisionError("of rank 1")
time.sleep(600)
