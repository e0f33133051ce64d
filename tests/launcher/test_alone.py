"""The probe thread ends when a script needs a process with one thread."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.forkserver.probe.exclusive import Away, away
from tests.kit.cli import phalanx, python

SCRIPTS = Path(__file__).parent / "scripts"
WAYS = {"cold": ["--no-warm"], "fresh": ["--fresh"], "warm": []}


@pytest.mark.parametrize(
    ("name", "arguments", "machine", "expected"),
    [
        ("unshare", (0x10000000,), "x86_64", "during"),
        ("setns", (3, 0), "x86_64", "during"),
        ("getpid", (), "x86_64", ""),
        ("prctl", (15, b"name"), "x86_64", ""),
        ("prctl", (22, 2), "aarch64", "permanently"),
        ("prctl", (ctypes.c_int(22), 2), "aarch64", "permanently"),
        ("prctl", (), "x86_64", ""),
        ("syscall", (186,), "x86_64", ""),
        ("syscall", (272, 0), "x86_64", "during"),
        ("syscall", (ctypes.c_long(97), 0), "aarch64", "during"),
        ("syscall", (317, 1, 0, None), "x86_64", "permanently"),
        ("syscall", (317,), "riscv64", ""),
        ("syscall", ("317",), "x86_64", ""),
        ("seccomp_load", (None,), "riscv64", "permanently"),
    ],
)
def test_when_the_thread_is_away(name: str, arguments: tuple[Any, ...], machine: str, expected: Away) -> None:
    assert away(name, arguments, machine) == expected


@pytest.mark.warmed
@pytest.mark.parametrize("way", WAYS)
def test_namespaces(way: str) -> None:
    expected = python(f"{SCRIPTS}/namespaces.py")
    if "unshare 0" not in expected.out:
        pytest.skip("this user may not make namespaces")
    found = phalanx("run", "--cpu", "-g", "1", *WAYS[way], f"{SCRIPTS}/namespaces.py")
    assert (found.out, found.code) == (expected.out, expected.code), found.err


@pytest.mark.extended
@pytest.mark.warmed
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="numbers of system calls differ")
@pytest.mark.parametrize("how", ["syscall", "prctl"])
@pytest.mark.parametrize("way", WAYS)
def test_a_filter_that_the_thread_would_not_survive(way: str, how: str) -> None:
    expected = python(f"{SCRIPTS}/sandbox.py", how)
    if "filter 0" not in expected.out:
        pytest.skip("this kernel has no filters")
    found = phalanx("run", "--cpu", "-g", "1", *WAYS[way], f"{SCRIPTS}/sandbox.py", how)
    assert (found.out, found.code) == (expected.out, expected.code), found.err
