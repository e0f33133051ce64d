"""Joins, or prints the error and how long the attempt took."""

from __future__ import annotations

import os
import sys
import time

from phalanx.errors import PhalanxError
from phalanx.worker.process_group.group import WorkerProcessGroup

start = time.monotonic()
try:
    WorkerProcessGroup.join(timeout=float(os.environ.get("JOIN_TIMEOUT", "60")))
    sys.stdout.write("met\n")
except PhalanxError as error:
    sys.stdout.write(f"{error}\nknown after {time.monotonic() - start:.0f} s\n")
