"""A cgroup with a limit, for the duration of a block, of the version that the kernel provides."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def cgroup(controller: str, limit: str, value: int) -> Iterator[tuple[str, ...]]:
    """Yield the words to put before a command so that it runs in the cgroup. `limit` is the name of a file, of version
    1 or 2.
    """
    root = f"/sys/fs/cgroup/{controller}"
    if not os.path.isdir(root):
        root = "/sys/fs/cgroup"
    if not os.access(root, os.W_OK):
        pytest.skip("only root can make a cgroup")
    path = f"{root}/phalanx-{os.getpid()}"
    os.mkdir(path)
    try:
        file = Path(path, limit)
        if not file.exists():
            file = Path(path, {"memory.limit_in_bytes": "memory.max"}[limit])
        file.write_text(str(value))
        yield ("sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', path)
    finally:
        os.rmdir(path)
