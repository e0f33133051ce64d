"""Under Open MPI across real hosts: `mpirun -H a:2,b:1 phalanx run`, a task for every rank or for every node."""

from __future__ import annotations

import re
import sys

from tests.e2e.nodes.test_slurm import ALLREDUCE, PLACE, places
from tests.kit.lab import Lab, Sshd, mpirun

RUN = (sys.executable, "-m", "phalanx", "run")


def test_one_task_a_rank(lab: Lab, ssh: Sshd) -> None:
    words = (*mpirun(ssh, "node1:2,node2:1"), "-n", "3", *RUN, ALLREDUCE)
    result = lab[0].run(words=words, env=ssh.env)
    assert result.code == 0, result.err
    assert sorted(re.findall(r"rank (\d) of 3: 6", result.out)) == ["0", "1", "2"], result.out


def test_one_task_a_node(lab: Lab, ssh: Sshd) -> None:
    words = (*mpirun(ssh, "node1:1,node2:1"), "-n", "2", *RUN, "-g", "2", "--fresh", PLACE)
    result = lab[0].run(words=words, env=ssh.env)
    assert result.code == 0, result.err
    assert places(result.out) == [
        "rank 0 of 4, local 0 of 2, node 0 of 2, on node1",
        "rank 1 of 4, local 1 of 2, node 0 of 2, on node1",
        "rank 2 of 4, local 0 of 2, node 1 of 2, on node2",
        "rank 3 of 4, local 1 of 2, node 1 of 2, on node2",
    ]


def test_workers_and_tasks_contradict_each_other(lab: Lab, ssh: Sshd) -> None:
    words = (*mpirun(ssh, "node1:2"), "-n", "2", *RUN, "-g", "2", "--fresh", PLACE)
    result = lab[0].run(words=words, env=ssh.env)
    assert result.code == 2
    assert "2 workers were requested, but Open MPI has started one task per rank (2 on this node)" in result.err
