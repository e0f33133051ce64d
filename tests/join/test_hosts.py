"""Across real hosts: a task of srun, of mpirun, and ranks that were started by hand where names mislead."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.kit.lab import Lab, Slurm, Sshd, mpirun

SCRIPTS = Path(__file__).parent / "scripts"
EVERYTHING = (sys.executable, str(SCRIPTS / "everything.py"))


def lines(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d+ of .*", text))


def uneven(launcher: str) -> list[str]:
    return [
        f"rank 0 of 3, local 0 of 2, node 0 of 2, gloo on cpu, by {launcher}",
        f"rank 1 of 3, local 1 of 2, node 0 of 2, gloo on cpu, by {launcher}",
        f"rank 2 of 3, local 0 of 1, node 1 of 2, gloo on cpu, by {launcher}",
    ]


def test_srun_python(lab: Lab, slurm: Slurm) -> None:
    result = lab[0].run(words=("srun", "-N2", "-n3", *EVERYTHING), env=slurm.env)
    assert result.code == 0, result.err
    assert lines(result.out) == uneven("Slurm")


def test_mpirun_python(lab: Lab, ssh: Sshd) -> None:
    words = mpirun(ssh, "node1:2,node2:1", pass_on=("PHALANX_HOME", "TMPDIR", "PATH", "HOME", "PYTHONPATH"))
    result = lab[0].run(words=(*words, *EVERYTHING), env={**ssh.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert result.code == 0, result.err
    assert lines(result.out) == uneven("Open MPI")


def test_by_hand_where_the_own_name_is_loopback(lab: Lab) -> None:
    for node in (lab[0], lab[1]):
        node.hosts("bad")
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": lab[0].address, "MASTER_PORT": "4000"}
    jobs = [lab[rank].start(words=EVERYTHING, env={**env, "RANK": str(rank)}) for rank in range(2)]
    assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.both for job in jobs)
    assert lines("\n".join(job.out for job in jobs)) == [
        f"rank {rank} of 2, local 0 of 1, node {rank} of 2, gloo on cpu, by hand-set variables" for rank in range(2)
    ]
