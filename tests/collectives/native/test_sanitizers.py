"""The C core with threads and processes as ranks: under sanitizers, and with a rank that dies at each point."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.collectives.engines import shm
from tests.collectives.forked import LIMIT

pytestmark = pytest.mark.xdist_group("native")
NATIVE = Path(shm.__file__).parents[1] / "native"
PROGRAM = Path(__file__).parent / "ranks.c"
FLAVOURS = {  # not optimized: compiling would take most of the time
    "thread": ["-g", "-fsanitize=thread", "-Dmmap=shared_mmap", "-Dmunmap=shared_munmap"],
    "address": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "faults": ["-DPHX_FAULTS"],
}
RUNS = [
    ("thread", "threads", 2, "direct"),
    ("thread", "threads", 3, "staged"),
    ("address", "processes", 3, "direct"),
    ("address", "processes", 4, "staged"),
    ("address", "processes", 1, "direct"),
    ("faults", "deaths", 2, "direct"),
    ("faults", "deaths", 3, "direct"),
    ("faults", "deaths", 3, "staged"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("native")

    @functools.cache
    def build(flavour: str) -> Path:
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-pthread", f"-I{NATIVE}", *FLAVOURS[flavour]]
        parts = []
        for source in [*sorted(NATIVE.glob("*.c")), PROGRAM]:
            if source.name == "binding.c":
                continue
            # The program itself uses the real mmap, to share the memory.
            own = [flag for flag in flags if not (source == PROGRAM and flag.startswith("-Dm"))]
            part = place / f"{flavour}-{source.stem}.o"
            subprocess.run(["gcc", *own, "-c", "-o", part, source], check=True, timeout=LIMIT)
            parts.append(part)
        subprocess.run(["gcc", *flags, "-o", place / flavour, *parts], check=True, timeout=LIMIT)
        return place / flavour

    return build


@pytest.mark.parametrize(("flavour", "mode", "size", "way"), RUNS, ids=["-".join(map(str, run)) for run in RUNS])
def test_all_collectives_and_all_deaths(
    built: Callable[[str], Path], flavour: str, mode: str, size: int, way: str
) -> None:
    # A search for leaks takes seconds at each exit, so only one of these runs does it.
    env = {**os.environ, "ASAN_OPTIONS": f"detect_leaks={int((size, way) == (3, 'direct'))}"}
    words = [built(flavour), mode, str(size), way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    if mode == "deaths":
        assert int(done.stdout.split()[0]) > 100
