"""Joins, or says why it could not and how long it took to know."""

from __future__ import annotations

import os
import sys
import time

from phalanx.errors import PhalanxError
from phalanx.join.group import Group

start = time.monotonic()
try:
    Group.join(timeout=float(os.environ.get("JOIN_TIMEOUT", "60")))
    sys.stdout.write("met\n")
except PhalanxError as error:
    sys.stdout.write(f"{error}\nknown after {time.monotonic() - start:.0f} s\n")
