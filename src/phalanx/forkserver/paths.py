"""Files and modules of phalanx that other code looks up by name: in stacks, and in `sys.modules`.

A test checks that every entry exists. Standard library only, like everything here: a worker loads it by path.
"""

from __future__ import annotations

import os

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Folders below ROOT.
USER_CODE = ("demo/",)  # ours, but written like user code: shown in stacks
FORK_SERVER = "forkserver/"  # its frames, below those of the script, are not interesting
ENTRY = ("worker/", "train/")  # between the command and the user's function
HOOK = "forkserver/hook/"  # put on PYTHONPATH of an interpreter that needs a probe
PROBE = ("forkserver/probe/", "forkserver/collective_check/", "forkserver/debug/")  # their threads are not shown
LIBRARY = ("collectives/", "worker/", "train/", "launcher/", "forkserver/")  # between a user's call and torch

# Prefix of a path below ROOT -> training phase; the first match counts.
PHASES = (
    ("train/data/loader.py", "data"),
    ("train/checkpoint/", "checkpoint"),
    ("train/snapshot/", "checkpoint"),
    ("worker/process_group/group.py", "collective"),
    ("worker/process_group/closing.py", "collective"),
    ("worker/process_group/values.py", "collective"),
    ("worker/", "join"),
    ("collectives/process_group/group.py", "collective"),
    ("collectives/process_group/work.py", "collective"),
)
COLLECTIVES = "collectives/"
WORK = "collectives/process_group/work.py"  # `wait` there waits for an operation in progress
THREADED = "collectives/engines/threaded.py"

# Modules, by their name in `sys.modules`.
FLIGHT_RECORDER = "phalanx.collectives.flight_recorder"
GROUPS = "phalanx.collectives.registry"
TRAINING = (  # what `phalanx.main` imports, at once or later
    "phalanx.train.main",
    "phalanx.train.elastic_loop",
    "phalanx.train.snapshot.snapshots",
    "phalanx.train.snapshot.cadence",
    "phalanx.collectives.registration",
    "phalanx.collectives.creation",
    "phalanx.collectives.engines.shm",
)
# Exceptions, as tracebacks name them.
ERRORS = "phalanx.collectives.errors"
TIMED_OUT = "CollectiveTimeout"
LOST_PEER = ("PeerLost", TIMED_OUT, "GroupAborted")  # caused by another rank
MISMATCH = "CollectiveMismatch"  # its message names the lines that matter
# Modules of the fork server, which a worker loads under another name.
_LOADED = "_phalanx_forkserver"
PROBE_MODULE = f"{_LOADED}.probe.probe"
CHECKER_MODULE = f"{_LOADED}.collective_check.checker"
