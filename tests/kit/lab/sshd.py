"""OpenSSH on every node of a lab, with its own key, as if set up by the user."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess

from tests.kit import proc
from tests.kit.lab.lab import Lab
from tests.kit.lab.needs import PATH
from tests.kit.lab.node import Node
from tests.kit.lab.service import Services
from tests.kit.proc import until

PORT = 2222
SSHD = "/usr/sbin/sshd"

SERVER = """\
Port {port}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
UseDNS no
AcceptEnv TMPDIR
PidFile none
MaxStartups 100
"""

# TMPDIR is forwarded so that the test finds leftovers there. PHALANX_HOME is not: phalanx must pass on what a run
# needs, and without it the folder is below the home of the lab.
CLIENT = """\
Host *
  User root
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  ServerAliveInterval 5
  ServerAliveCountMax 2
  LogLevel ERROR
  SendEnv TMPDIR
"""


class Sshd(Services):
    """
    ssh = lab.sshd()
    lab[0].run(words=("ssh", lab[1].name, "hostname"), env=ssh.env)
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab, "ssh")
        for name in ("key", "hostkey"):
            words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", f"{self.folder}/{name}")
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        self.config = f"{self.folder}/ssh_config"
        self._write("sshd_config", SERVER.format(port=PORT, folder=self.folder))
        self._write("ssh_config", CLIENT.format(port=PORT, folder=self.folder))
        with open(f"{self.folder}/hostkey.pub") as file:
            kind, key, *_ = file.read().split()
        hosts = [name for node in lab for name in (node.name, node.address, node.address6)]
        self._write("known_hosts", "".join(f"[{host}]:{PORT} {kind} {key}\n" for host in hosts))
        os.mkdir(f"{self.folder}/bin")
        self.wrapper = f"{self.folder}/bin/ssh"
        self._write("bin/ssh", f'#!/bin/sh\nexec {shutil.which("ssh", path=PATH)} -F {self.config} "$@"\n')
        os.chmod(self.wrapper, 0o755)
        self.start()

    @property
    def env(self) -> dict[str, str]:
        """The environment in which `ssh` is the real one, with the lab's configuration as the user's."""
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def cut(self, node: Node) -> None:
        """Cut the incoming connections of a node. Processes that they have started there are not touched."""
        sessions = [pid for pid in proc.descendants(self.pid(node, SSHD)) if proc.command(pid).startswith("sshd:")]
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wanted(self) -> list[tuple[Node, tuple[str, ...]]]:
        return [(node, (SSHD, "-D", "-e", "-f", f"{self.folder}/sshd_config")) for node in self.lab]

    def wait_until_up(self) -> None:
        for node in self.lab:
            until(lambda node=node: _listens(node), 10, f"sshd on {node.name}")  # type: ignore[misc]

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.folder}/{name}", "w") as file:
            file.write(text)


def _listens(node: Node) -> bool:
    with open(f"/proc/{node.init}/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    address = f"{socket.INADDR_ANY:08X}:{PORT:04X}"
    return any(row[1] == address and row[3] == proc.LISTEN for row in rows)
