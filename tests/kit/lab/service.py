"""Daemons of a lab, in the foreground as our own children, restarted when a test has killed them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from tests.kit.cli import environment
from tests.kit.lab import entry
from tests.kit.lab.lab import Lab
from tests.kit.lab.node import Node

OWN = ("SLURM_", "PHALANX_", "TMPDIR")  # variables of the first test, which a daemon must not have


class Services:
    """The base of Sshd and Slurm: the subclass defines what runs where, and when it is up."""

    def __init__(self, lab: Lab, folder: str) -> None:
        self.lab = lab
        self.folder = f"{lab.folder}/{folder}"
        os.mkdir(self.folder)
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        lab.services.append(self)

    def wanted(self) -> list[tuple[Node, tuple[str, ...]]]:
        raise NotImplementedError

    def wait_until_up(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start daemons that are not running. Costs nothing if all are."""
        started = False
        for node, words in self.wanted():
            key = node.name, words[0]
            if key not in self._running or self._running[key].poll() is not None:
                self._running[key] = self._spawn(node, words)
                started = True
        if started:
            self.wait_until_up()

    def stop(self) -> None:
        """Stop all daemons and wait until they have ended."""
        if self in self.lab.services:
            self.lab.services.remove(self)
        for process in reversed(self._running.values()):
            end(process)
        self._running.clear()

    def log(self) -> str:
        """Return the output of the daemons, for the message of a failure."""
        found = []
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(".log"):
                with open(f"{self.folder}/{name}", errors="replace") as file:
                    found.append(f"--- {name}\n{file.read()[-2000:]}")
        return "\n".join(found)

    def pid(self, node: Node, program: str) -> int:
        return self._running[node.name, program].pid

    def runs(self, node: Node, program: str) -> bool:
        process = self._running.get((node.name, program))
        return process is not None and process.poll() is None

    def _spawn(self, node: Node, words: Sequence[str]) -> subprocess.Popen[bytes]:
        env = environment(dict.fromkeys([name for name in os.environ if name.startswith(OWN)]))
        with open(f"{self.folder}/{os.path.basename(words[0])}.{node.name}.log", "ab") as log:
            return entry.spawn(
                node.init,
                words,
                cwd="/",
                env=env | {"HOME": self.lab.home},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def end(process: subprocess.Popen[bytes], grace: float = 5) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
