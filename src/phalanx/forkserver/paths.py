"""Files and modules of phalanx that other code finds by name: in stacks, and in `sys.modules`.

A test checks that every entry exists, so that a moved file cannot go unnoticed. Standard library only, as everything
here: a worker loads it by path.
"""

from __future__ import annotations

import os

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Folders below ROOT.
USER_CODE = ("demo/",)  # ours, but written as users write: shown in stacks
FORK_SERVER = "forkserver/"  # its frames, below those of the script, say nothing
ENTRY = ("worker/", "train/")  # what stands between the command and the user's function
PROBE = ("forkserver/probe/", "forkserver/collective_check/", "forkserver/debug/")  # their threads are no evidence
LIBRARY = ("collectives/", "worker/", "train/", "launch/", "forkserver/")  # between a user's call and torch

# The beginning of a path below ROOT -> the phase of a training; the first that fits counts.
PHASES = (
    ("train/data/loader.py", "data"),
    ("train/checkpoint/", "checkpoint"),
    ("train/snapshot/", "checkpoint"),
    ("worker/process_group/group.py", "collective"),
    ("worker/", "join"),
    ("collectives/group.py", "collective"),
    ("collectives/work.py", "collective"),
)
COLLECTIVES = "collectives/"
WORK = "collectives/work.py"  # `wait` there waits for an operation that is under way
THREADED = "collectives/engines/threaded.py"

# Modules, as `sys.modules` knows them where they are imported.
FLIGHT_RECORDER = "phalanx.collectives.flight_recorder"
GROUPS = "phalanx.collectives.registry"
TRAINING = ("phalanx.train.main", "phalanx.train.elastic.elastic_loop")
# Exceptions, as tracebacks name them.
ERRORS = "phalanx.collectives.errors"
TIMED_OUT = "CollectiveTimeout"
LOST_PEER = ("PeerLost", TIMED_OUT, "GroupAborted")  # another rank is the cause
MISMATCH = "CollectiveMismatch"  # its text names the lines that matter
# The fork server's own, which a worker knows by another name.
_LOADED = "_phalanx_forkserver"
PROBE_MODULE = f"{_LOADED}.probe.probe"
CHECKER_MODULE = f"{_LOADED}.collective_check.checker"
