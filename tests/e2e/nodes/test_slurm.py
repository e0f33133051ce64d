"""In a real Slurm cluster of three nodes: one task per node, one per rank, a batch script, signals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.kit.cli import until
from tests.kit.lab import Lab, Slurm

RUN = (sys.executable, "-m", "phalanx", "run")
EXPLAIN = (sys.executable, "-m", "phalanx", "plan", "--json")
SCRIPTS = Path(__file__).parents[1] / "scripts"
PLACE = str(SCRIPTS / "place.py")
ALLREDUCE = str(SCRIPTS / "allreduce.py")
GRACE = str(SCRIPTS / "grace.py")
PREEMPT = str(SCRIPTS.parents[1] / "train" / "scripts" / "preempt.py")


def places(text: str) -> list[str]:
    """Parse `rank 2 of 3, local 0 of 1, node 1 of 2, on node2`, by rank."""
    return sorted(re.findall(r"rank \d+ of .*", text))


def test_one_task_a_node(lab: Lab, slurm: Slurm) -> None:
    words = ("srun", "-N2", "-n2", "--ntasks-per-node=1", *RUN, "-g", "2,1", ALLREDUCE)
    result = lab[0].run(words=words, env=slurm.env)
    assert result.code == 0, result.err
    assert sorted(re.findall(r"rank (\d) of 3: 6", result.out)) == ["0", "1", "2"], result.out


def test_one_task_a_rank(lab: Lab, slurm: Slurm) -> None:
    """Slurm puts 2 tasks on the first node and 1 on the second; logs of all of them come once, from node 0."""
    result = lab[0].run(words=("srun", "-N2", "-n3", *RUN, ALLREDUCE), env=slurm.env)
    assert result.code == 0, result.err
    assert sorted(re.findall(r"rank (\d) of 3: 6", result.out)) == ["0", "1", "2"], result.out


def test_ranks_as_slurm_deals_them_out(lab: Lab, slurm: Slurm) -> None:
    words = ("srun", "-N2", "-n4", "-m", "cyclic", *RUN, "--fresh", PLACE)
    result = lab[0].run(words=words, env={**slurm.env, "SLURM_HINT": None})
    assert result.code == 0, result.err
    found = places(result.out)
    assert [line.split(", on ")[1] for line in found][:2] == ["node1", "node2"], found
    assert len(found) == 4


def test_rank_0_need_not_be_on_the_first_node(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node2\nnode1\nnode2\n")
    words = ("srun", "-n3", "-N2", "--distribution=arbitrary", "-w", str(hosts), *RUN, "--fresh", PLACE)
    result = lab[0].run(words=words, env=slurm.env)
    assert result.code == 0, result.err
    assert [line.split(", on ")[1] for line in places(result.out)] == ["node2", "node1", "node2"], result.out


def test_batch_script_with_uneven_tasks(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    """`phalanx run` in the script starts its own srun; -N2 -n3 is 2 tasks and 1, so 2 ranks and 1."""
    out = batch(lab, slurm, tmp_path, "-N2", "-n3", command=[*RUN, "--fresh", PLACE])
    assert places(out) == [
        "rank 0 of 3, local 0 of 2, node 0 of 2, on node1",
        "rank 1 of 3, local 1 of 2, node 0 of 2, on node1",
        "rank 2 of 3, local 0 of 1, node 1 of 2, on node2",
    ]


def test_the_token_of_a_batch_script_is_seen_nowhere(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "snoop.py"
    script.write_text(
        "import glob, os\n"
        "print('token' if 'PHALANX_TOKEN' in os.environ else 'no token', 'in the environment')\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    print('command', open(path, 'rb').read())\n"
    )
    out = batch(lab, slurm, tmp_path, "-N2", command=[*RUN, "--fresh", str(script)])
    assert out.count("no token in the environment") == 2, out
    assert not re.search(r"[0-9a-f]{64}", out)


def batch(lab: Lab, slurm: Slurm, folder: Path, *options: str, command: list[str]) -> str:
    job, out = folder / "job.sh", folder / "job.out"
    job.write_text("#!/bin/bash\n" + " ".join(command) + "\n")
    result = lab[0].run(words=("sbatch", "--wait", *options, "-o", str(out), str(job)), env=slurm.env)
    assert result.code == 0, result.err + out.read_text()
    return out.read_text()


def test_options_that_contradict_slurm_are_refused(lab: Lab, slurm: Slurm) -> None:
    for options, seen in (
        (("-n", "3"), "--nnodes 3 and Slurm, which has 2 nodes, contradict each other"),
        (("--hosts", "node1,node2"), "--hosts and Slurm both say where the ranks run"),
    ):
        words = ("srun", "-N2", "-n2", "--ntasks-per-node=1", *RUN, *options, "--fresh", PLACE)
        result = lab[0].run(words=words, env=slurm.env)
        assert result.code == 2
        assert seen in result.err
        assert "SLURM_STEP_NUM_NODES=2" in result.err


def test_explain_in_a_step_says_what_would_run(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    words = ("srun", "-N2", "-n3", "-o", f"{tmp_path}/%t.json", *EXPLAIN, "--fresh", PLACE)
    assert lab[0].run(words=words, env=slurm.env).code == 0
    facts = json.loads((tmp_path / "2.json").read_text())
    assert facts["source"] == "Slurm, one task per rank"
    assert [(node["host"], node["workers"]) for node in facts["nodes"]] == [("node1", 2), ("node2", 1)]
    assert [(rank["rank"], rank["node"], rank["local_rank"]) for rank in facts["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    ]


def test_usr1_is_handed_to_the_workers_once(lab: Lab, slurm: Slurm) -> None:
    """Slurm signals every process of a step, including the workers: they must not get it a second time from us."""
    words = ("srun", "-N2", "-n2", "--ntasks-per-node=1", *RUN, "--fresh", GRACE)
    job = lab[0].start(words=words, env=slurm.env)
    job.wait_for("ready", count=2)
    lab[0].run(words=("scancel", "-s", "USR1", running(lab, slurm)), env=slurm.env)
    job.wait_for("SIGUSR1", count=2)
    lab[0].run(words=("scancel", running(lab, slurm)), env=slurm.env)
    assert job.wait() == 143, job.both
    for rank in range(2):
        assert job.both.count(f"rank {rank} got SIGUSR1") == 1, job.both
        assert job.both.count(f"rank {rank} got SIGTERM") == 1, job.both
        assert job.both.count(f"rank {rank} saved") == 1, job.both


def test_a_job_that_is_preempted_says_that_it_wants_to_be_run_again(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    """Slurm signals every process of the step: agents, fork servers and workers."""
    script, out = tmp_path / "job.sh", tmp_path / "job.out"
    options = ("--cpu", "-g", "1", "--checkpoints", f"{tmp_path}/kept")
    command = " ".join([*RUN, *options, PREEMPT, str(tmp_path)])
    script.write_text(f"#!/bin/bash\n{command}\necho ended with $?\n")
    lab[0].run(words=("sbatch", "-N2", "-o", str(out), str(script)), env=slurm.env)
    until((tmp_path / "steps.1").exists, 60, "a step to be made")
    lab[0].run(words=("scancel", "-s", "TERM", running(lab, slurm)), env=slurm.env)
    until(lambda: "ended with" in out.read_text(), 60, "the job to end")
    until(lambda: not any("stepd" in process.command for node in lab for process in node.processes()), 60)
    assert out.read_text().endswith("ended with 75\n"), out.read_text()
    steps = [int(line.split()[0]) for line in (tmp_path / "steps.1").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert f"preempted by SIGTERM: step {len(steps)} is in {tmp_path}/kept" in out.read_text()
    assert [path.name for path in (tmp_path / "kept").glob("step-*")] == [f"step-{len(steps):012}"]


def test_a_task_that_is_killed_ends_the_job(lab: Lab, slurm: Slurm) -> None:
    job = lab[0].start(words=("srun", "-N2", "-n2", "--ntasks-per-node=1", *RUN, "--fresh", GRACE), env=slurm.env)
    job.wait_for("ready", count=2)
    lab[1].run(words=("pkill", "-KILL", "-f", "phalanx run"))
    assert job.wait() != 0
    assert "node 1 (node2) is lost" in job.both
    until(lambda: not any("grace.py" in process.command for node in lab.nodes for process in node.processes()))


def running(lab: Lab, slurm: Slurm) -> str:
    return lab[0].run(words=("squeue", "-h", "-o", "%i"), env=slurm.env).out.split()[0]
