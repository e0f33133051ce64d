"""Enters a node, for a child of the test itself: signals reach it, and it returns its own exit code."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from tests.kit.lab import kernel
from tests.kit.lab.needs import PATH


def spawn(init: int, words: Sequence[str], *, cwd: str | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in all namespaces of the node whose init has this pid."""
    # nsenter forks for a pid namespace, and hides the command behind itself: so that namespace is entered here. The
    # working directory must be looked up inside, otherwise it would be outside every mount that the command sees.
    inside = ("nsenter", f"--target={init}", "--mount", "--uts", "--ipc", "--net", f"--wdns={cwd or os.getcwd()}")
    with _children_in(init):
        return subprocess.Popen([*inside, "--", *words], start_new_session=True, **options)


def tool(init: int, *words: str, text: str = "") -> str:
    """Return the output of a command in the network of the node, but with our own pids and files."""
    inside = ("nsenter", f"--target={init}", "--net", "--", *words)
    done = subprocess.run(inside, env={"PATH": PATH}, input=text, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: exit code {done.returncode}\n{text}{done.stderr}{done.stdout}")
    return done.stdout


@contextlib.contextmanager
def _children_in(init: int) -> Iterator[None]:
    """Start children of this thread in the node's pid namespace. No thread can be started meanwhile."""
    ours, theirs = (os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC) for pid in ("self", init))
    try:
        kernel.setns(theirs, kernel.NEWPID)
        try:
            yield
        finally:
            kernel.setns(ours, kernel.NEWPID)
    finally:
        os.close(ours)
        os.close(theirs)
