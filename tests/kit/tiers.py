"""Which tests `make test` runs, and which run in `make test-all` only. This is the one place that decides.

`make test` is what a contributor runs: unit tests, and real runs on one host, in minutes. A test is `extended`, which
means that only `make test-all` runs it, if one of these is true:

1. It needs a system: network namespaces, sshd, Slurm, MPI, Chromium, sanitizers, torch's own suite or torchrun.
2. It is in tests/e2e, and not marked `smoke`. Mark one test or a few of each command or capability: the cheapest that
   fails when the capability is broken.
3. It is marked `extended`: a real run in the tests of a package that needs more than about three seconds of CPU time.
   Put what such a test decides into a unit test as well, which `make test` runs.
"""

from __future__ import annotations

import os

import pytest

SYSTEM_FIXTURES = {"lab", "_lab", "ssh", "slurm"}
SYSTEM_FILES = (
    *("e2e/nodes/test_mpi.py", "e2e/watch/test_browser.py", "e2e/watch/test_page.py", "e2e/launch/test_compat.py"),
    *(
        "bench/test_browser.py",
        "watch/page/test_page.py",
        "watch/page/test_page_controls.py",
        "watch/page/test_runs_page.py",
    ),
    *("collectives/test_suite.py", "collectives/test_mpi.py", "collectives/native/", "faithful/"),
)
REAL_RUNS = "e2e/"
MARKERS = (
    "extended: runs in `make test-all` only; see tests/kit/tiers.py",
    "smoke: a test of tests/e2e that `make test` runs, too",
)


def needs_system(path: str, fixtures: frozenset[str]) -> bool:
    """Return whether a test of this file, relative to tests/, needs more than one plain host."""
    return path.startswith(SYSTEM_FILES) or not SYSTEM_FIXTURES.isdisjoint(fixtures)


def is_extended(path: str, fixtures: frozenset[str], marks: frozenset[str]) -> bool:
    """Return whether only `make test-all` runs the test."""
    if "smoke" in marks:
        return needs_system(path, fixtures)
    return "extended" in marks or path.startswith(REAL_RUNS) or needs_system(path, fixtures)


def sort(items: list[pytest.Item]) -> None:
    """Mark the extended tests."""
    root = os.path.dirname(os.path.dirname(__file__))
    for item in items:
        fixtures = frozenset(getattr(item, "fixturenames", ()))
        marks = frozenset(mark.name for mark in item.iter_markers())
        if is_extended(os.path.relpath(item.path, root), fixtures, marks):
            item.add_marker("extended")
