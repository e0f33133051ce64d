"""The command line of Debian's Open MPI across nodes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.kit.lab.sshd import Sshd

PASSED_ON = ("PHALANX_HOME", "TMPDIR", "PATH", "HOME")


def mpirun(ssh: Sshd, hosts: str, *, options: Sequence[str] = (), pass_on: Sequence[str] = PASSED_ON) -> list[str]:
    """Return the words to put before a command: mpirun(ssh, "node1:2,node2:1"), one process per slot."""
    count = sum(int(host.partition(":")[2] or 1) for host in hosts.split(","))
    # Unbound: rank 0 of every node would get the same core of the one real machine.
    words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--host", hosts, "-n", str(count)]
    settings = {
        "plm_rsh_agent": ssh.wrapper,
        "oob_tcp_if_include": "eth0",
        "btl_tcp_if_include": "eth0",
        "btl": "tcp,self,vader",
    }
    for name, value in settings.items():
        words += ["--mca", name, value]
    for name in pass_on:
        words += ["-x", name]
    return [*words, *options]
