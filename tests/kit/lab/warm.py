"""A warm fork server on every node, for tests that are marked `warmed`: torch is imported once on each.

They share one PHALANX_HOME, like nodes with a shared disk: a fork server serves only its own namespaces.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.kit import proc
from tests.kit.cli import Env

if TYPE_CHECKING:
    from tests.kit.lab.lab import Lab
    from tests.kit.lab.node import Node

PRELOAD = "phalanx.train.main"  # besides torch


class WarmNodes:
    """The fork servers of a lab, and the folders in which its nodes find them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.fork_servers: dict[str, int] = {}  # pids outside, by the name of the node
        self._root = f"{lab.folder}/warm"
        self.env: Env = {
            "TMPDIR": f"{self._root}/tmp",
            "PHALANX_HOME": f"{self._root}/home",
            "OMP_NUM_THREADS": "1",  # as in the fork servers
        }

    def start(self) -> Env:
        """Start fork servers that are not running: at first, and when a test has killed one."""
        os.makedirs(f"{self._root}/tmp", exist_ok=True)
        self._start([node for node in self.lab if not node.fork_server or not proc.alive(node.fork_server)])
        return self.env

    def _start(self, nodes: list[Node]) -> None:
        jobs = [node.start("warm", "--preload", PRELOAD, env=self.env) for node in nodes]
        for node, job in zip(nodes, jobs, strict=True):
            assert job.wait(180) == 0, job.both
            inside = int(job.out.split("(pid ")[1].split(")")[0])
            (found,) = (each.pid for each in node.living() if proc.pid_inside(each.pid) == inside)
            self.fork_servers[node.name] = found
