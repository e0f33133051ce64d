"""Nodes connected by a switch, for the duration of a block."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from tests.kit import proc, state
from tests.kit.lab import entry, needs
from tests.kit.lab.node import Node
from tests.kit.lab.warm import WarmNodes

if TYPE_CHECKING:
    from tests.kit.lab.service import Services
    from tests.kit.lab.slurm import Slurm
    from tests.kit.lab.sshd import Sshd

HOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "holder.py")
PREFIX = "phalanx-lab-"  # followed by the pid of the creator
NETWORK = "10.77.0"
NETWORK6 = "fd77:"


class Lab:
    """
    with Lab(3) as lab:
        lab[0].run(words=("ping", "-c1", lab[1].name))
    """

    def __init__(self, count: int = 3) -> None:
        needs.check()
        self.count = count
        self.services: list[Services] = []
        _remove_left_overs()
        self.folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        self.home = f"{self.folder}/home"  # of the user, on every node
        os.chmod(self.folder, 0o755)  # munge requires its socket to be reachable
        os.mkdir(self.home)
        self.warm = WarmNodes(self)
        self._holders: list[subprocess.Popen[bytes]] = []
        self._inits: list[int] = []
        try:
            for number in range(count + 1):
                self._holders.append(self._hold(number))
            for holder in self._holders:
                assert holder.stdout
                self._inits.append(int(holder.stdout.readline()))
            self.switch = self._inits[0]
            self._join()
            self.nodes = [Node(self, number, self._inits[number]) for number in range(1, count + 1)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, place: int) -> Node:
        return self.nodes[place]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return self.count

    def sshd(self) -> Sshd:
        from tests.kit.lab.sshd import Sshd

        return Sshd(self)

    def slurm(self, cpus: int = 4) -> Slurm:
        from tests.kit.lab.slurm import Slurm

        return Slurm(self, cpus)

    def reset(self) -> None:
        for node in self.nodes:
            node.reset()
        for name in os.listdir(self.home):
            if name != ".ssh":
                path = f"{self.home}/{name}"
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def close(self) -> None:
        """End everything in the nodes. The namespaces are freed with their last process."""
        for service in [*self.services]:
            service.stop()
        for init in self._inits:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
        for holder in self._holders:
            holder.kill()  # its child, the init, ends with it; it may not exist yet
            proc.until(partial(_ended, holder), 20, "a node to end")
            if holder.stdout:
                holder.stdout.close()
        self._inits.clear()
        self._holders.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Names and files

    def name(self, number: int) -> str:
        return f"node{number}" if number else "switch"

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number}"

    def address6(self, number: int) -> str:
        return f"{NETWORK6}:{number}"

    def hosts(self, number: int, kind: str) -> str:
        """Return the text of a node's hosts file."""
        if kind not in ("good", "good6", "bad", "none"):
            return kind
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        if kind == "bad":
            lines.append(f"127.0.1.1 {self.name(number)}")
        for other in range(1, self.count + 1):
            if other != number or kind in ("good", "good6"):
                address = self.address6(other) if kind == "good6" else self.address(other)
                lines.append(f"{address} {self.name(other)}")
        return "\n".join(lines) + "\n"

    def write(self, number: int, name: str, text: str) -> None:
        # In place: the node has mounted this file, not this name, over its own.
        with open(f"{self._folder(number)}/{name}", "w") as file:
            file.write(text)

    def _folder(self, number: int) -> str:
        return f"{self.folder}/{self.name(number)}"

    # The network

    def ip(self, *lines: str) -> None:
        """Run lines of `ip -batch` in the switch."""
        entry.tool(self.switch, "ip", "-batch", "-", text="\n".join(lines))

    def has_link(self, name: str) -> bool:
        return f": {name}:" in entry.tool(self.switch, "ip", "-o", "link")

    def offload(self, on: bool) -> None:
        word = "on" if on else "off"
        for node in self.nodes:
            node.tool("ethtool", "-K", "eth0", "tx", word, "tso", word, "gso", word)

    def _hold(self, number: int) -> subprocess.Popen[bytes]:
        os.mkdir(self._folder(number))
        self.write(number, "hosts", self.hosts(number, "good"))
        self.write(number, "hostname", f"{self.name(number)}\n")
        self.write(number, "resolv.conf", "")
        with open("/etc/passwd") as file:
            lines = [line.split(":") for line in file]
        # Processes that come in through ssh or slurm must not write into the home of the user who runs the tests.
        lines = [[*line[:5], self.home, *line[6:]] if line[2] == str(os.getuid()) else line for line in lines]
        self.write(number, "passwd", "".join(map(":".join, lines)))
        words = (sys.executable, "-S", HOLDER, self.name(number), self._folder(number), str(os.getpid()))
        return subprocess.Popen(
            words, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )

    def _join(self) -> None:
        lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        for number, init in enumerate(self._inits[1:], 1):
            lines.append(f"link add p{number} type veth peer name eth0 netns {init}")
            lines.append(f"link set p{number} master br0 up")
        self.ip(*lines)
        for number, init in enumerate(self._inits[1:], 1):
            text = (
                f"link set lo up\naddr add {self.address(number)}/24 dev eth0\n"
                f"addr add {self.address6(number)}/64 dev eth0 nodad\nlink set eth0 up\n"
            )
            entry.tool(init, "ip", "-batch", "-", text=text)


def _ended(holder: subprocess.Popen[bytes]) -> bool:
    # An init ends only when all processes of its node are reaped. This call reaps those whose parent is this process.
    state.family()
    return holder.poll() is not None


def _remove_left_overs() -> None:
    """Remove the files of labs whose creators were killed. Nothing else of those is left."""
    for name in os.listdir(tempfile.gettempdir()):
        if name.startswith(PREFIX) and not proc.alive(int(name.removeprefix(PREFIX).partition("-")[0])):
            shutil.rmtree(f"{tempfile.gettempdir()}/{name}", ignore_errors=True)
