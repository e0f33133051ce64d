"""The requirements of a lab: root, and the packages that .ci/packages installs."""

from __future__ import annotations

import os
import shutil

PATH = f"{os.defpath}:/usr/sbin:/sbin:/usr/local/sbin"
PROGRAMS = {
    "iproute2": ("ip",),
    "nftables": ("nft",),
    "iputils-ping": ("ping",),
    "ethtool": ("ethtool",),
    "procps": ("sysctl",),
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh", "ssh-keygen"),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurm-client": ("srun", "sinfo"),
    "munge": ("munged",),
    "openmpi-bin": ("mpirun",),
}


def check() -> None:
    """Fail, instead of skipping: tests that silently do not run are worse than none."""
    missing = [name for name, programs in PROGRAMS.items() if not all(map(find, programs))]
    assert not missing, f"the lab needs the packages {', '.join(missing)}\n  fix: run .ci/packages as root"
    assert os.geteuid() == 0, (
        f"the lab makes namespaces, which only root can: this is user {os.geteuid()}\n"
        "  fix: run the tests as root, after .ci/packages"
    )


def find(program: str) -> str | None:
    return shutil.which(program, path=PATH)
