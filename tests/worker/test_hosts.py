"""On real hosts: tasks of srun and mpirun, ranks started by hand, and wrong addresses."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.handle import Handle
from tests.kit.lab import Lab, Slurm, Sshd, mpirun

SCRIPTS = Path(__file__).parent / "scripts"
EVERYTHING = (sys.executable, str(SCRIPTS / "everything.py"))
MEETING = str(SCRIPTS / "meeting.py")


def lines(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d+ of .*", text))


def uneven(launcher: str) -> list[str]:
    return [
        f"rank 0 of 3, local 0 of 2, node 0 of 2, shm on cpu, by {launcher}",
        f"rank 1 of 3, local 1 of 2, node 0 of 2, shm on cpu, by {launcher}",
        f"rank 2 of 3, local 0 of 1, node 1 of 2, shm on cpu, by {launcher}",
    ]


def test_srun_python(lab: Lab, slurm: Slurm) -> None:
    result = lab[0].run(words=("srun", "-N2", "-n3", *EVERYTHING), env=slurm.env, timeout=150)
    assert result.code == 0, result.err
    assert lines(result.out) == uneven("Slurm")


def test_mpirun_python(lab: Lab, ssh: Sshd) -> None:
    words = mpirun(ssh, "node1:2,node2:1", pass_on=("PHALANX_HOME", "TMPDIR", "PATH", "HOME", "PYTHONPATH"))
    env = {**ssh.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    result = lab[0].run(words=(*words, *EVERYTHING), env=env, timeout=150)
    assert result.code == 0, result.err
    assert lines(result.out) == uneven("Open MPI")


@pytest.mark.imported
def test_by_hand_where_the_own_name_is_loopback(lab: Lab) -> None:
    for node in (lab[0], lab[1]):
        node.hosts("bad")
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": lab[0].address, "MASTER_PORT": "4000"}
    jobs = [lab[rank].python(EVERYTHING[1], env={**env, "RANK": str(rank)}) for rank in range(2)]
    assert [job.wait(120) for job in jobs] == [0, 0], "\n".join(job.both for job in jobs)
    assert lines("\n".join(job.out for job in jobs)) == [
        f"rank {rank} of 2, local 0 of 1, node {rank} of 2, gloo on cpu, by hand-set variables" for rank in range(2)
    ]


# -- wrong addresses


def pair(lab: Lab, address: str, each: Mapping[str, str] | None = None) -> list[Handle]:
    """Start rank 0 on node1 and rank 1 on node2, with this MASTER_ADDR."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "4000", **(each or {})}
    return [lab[rank].python(MEETING, env={**env, "RANK": str(rank)}) for rank in range(2)]


def refused(job: Handle) -> str:
    """Return the message of a rank that could not join. Check that it did not take long."""
    assert job.wait() == 0, job.both
    (seconds,) = re.findall(r"known after (\d+) s", job.out)
    assert int(seconds) < 45, job.out  # of the 60 s that it has
    return job.out


@pytest.mark.imported
def test_rank_0_is_not_on_the_address(lab: Lab) -> None:
    jobs = pair(lab, "node3")
    text = refused(jobs[0])
    assert "rank 0 runs on node1, but node3 is the address of another host" in text
    assert "MASTER_ADDR=node3" in text
    assert f"fix: MASTER_ADDR={lab[0].address}, the same for every rank" in text
    # The other rank cannot know the reason, but reports what it waits for.
    jobs[1].wait_for(
        f"rank 1 waits for rank 0 at node3 port 4000 (MASTER_ADDR=node3): {lab[2].address}: nothing listens"
    )


@pytest.mark.imported
def test_the_address_is_that_of_another_rank_alone(lab: Lab) -> None:
    jobs = pair(lab, "node2", {"LOCAL_WORLD_SIZE": "1"})
    assert "rank 0 runs on node1, but node2 is the address of another host" in refused(jobs[0])
    assert "node2 is node2, where rank 1 runs alone: rank 0 is on another host" in refused(jobs[1])


@pytest.mark.imported
def test_loopback_for_ranks_that_are_known_to_be_on_several_nodes(lab: Lab) -> None:
    for job in pair(lab, "localhost", {"LOCAL_WORLD_SIZE": "1"}):
        assert "localhost is the loopback address, but the ranks are on several hosts" in refused(job)


@pytest.mark.imported
def test_loopback_for_ranks_whose_host_is_unknown(lab: Lab) -> None:
    """All may be on one machine, and some may be late. They report the reason in seconds, and fail later."""
    jobs = pair(lab, "127.0.0.1", {"JOIN_TIMEOUT": "8"})
    at = "127.0.0.1 port 4000 (MASTER_ADDR=127.0.0.1)"
    jobs[0].wait_for(f"rank 0 waits for rank 1 at {at}, which no other host can reach")
    jobs[1].wait_for(f"rank 1 waits for rank 0 at {at}: nothing listens there yet (connection refused); that is this")
    assert "1 of 2 ranks did not come in 8 s: rank 1" in refused(jobs[0])
    assert "rank 0 is missing: no process listened on 127.0.0.1 port 4000 within 8 s" in refused(jobs[1])


@pytest.mark.imported
@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("10.99.0.1", "there is no route from node2 to 10.99.0.1"),
        ("node3", "node3 does not answer on port 4000"),
    ],
)
def test_an_address_that_cannot_be_reached(lab: Lab, address: str, seen: str) -> None:
    lab[2].drop(True)
    jobs = pair(lab, address)
    assert f"rank 0 runs on node1, but {address} is the address of another host" in refused(jobs[0])
    assert seen in refused(jobs[1])
