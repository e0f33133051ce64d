"""Runs the same command on several nodes of a lab, and finds its processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.kit.cli import Env, until
from tests.kit.handle import Handle
from tests.kit.lab import Lab
from tests.kit.lab.node import Home

TOKEN = "5e" * 32  # of nodes that share no disk
PLAIN = ("--fresh", "--cpu")  # starts fast: for scripts without torch


def together(
    lab: Lab, *words: str, ranks: Sequence[int] = (2, 1), home: Home = "shared", env: Env | None = None
) -> list[Handle]:
    """Start `phalanx run … WORDS` on as many nodes as there are numbers of ranks; the first of them leads."""
    env = {**(env or {}), **({"PHALANX_TOKEN": TOKEN} if home == "own" else {})}
    same = ("-n", str(len(ranks)), "-g", ",".join(map(str, ranks)), "--master", lab[0].name)
    return [lab[place].start("run", *same, "-i", str(place), *words, home=home, env=env) for place in range(len(ranks))]


def codes(jobs: Sequence[Handle], timeout: float = 60) -> list[int]:
    return [job.wait(timeout) for job in jobs]


def texts(jobs: Sequence[Handle]) -> str:
    """Return the output, for the message of a failure."""
    return "\n".join(f"--- node {place}\n{job.both[-4000:]}" for place, job in enumerate(jobs))


def alive(lab: Lab) -> list[str]:
    """Return the processes on the nodes, without services of the lab."""
    found = [(node.name, command) for node in lab for _, command in node.processes()]
    return [f"{name}: {command}" for name, command in found if sys.executable in command]


def all_gone(lab: Lab, timeout: float = 10) -> None:
    until(lambda: not alive(lab), timeout, "no process to be left on any node")
