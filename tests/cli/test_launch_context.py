"""One node or several, from any source: each gives the same ranks, and conflicting sources are an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.expected_nodes import ExpectedNodes, expected_nodes
from phalanx.cli.launch_context import LaunchContext, detect_context
from phalanx.cli.options import parse_run
from phalanx.cli.planning import make_plan
from phalanx.errors import UsageError

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
}
ONE_A_RANK = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
ONE_A_NODE = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "node1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-node1-1@1",
}
SEATS = [(0, 0, 0), (1, 0, 1), (2, 1, 0)]


def look(line: str, environ: dict[str, str], home: Path) -> LaunchContext:
    return detect_context(parse_run([*line.split(), __file__], environ), environ, str(home))


def seen(line: str, environ: dict[str, str], home: Path, here: int = 1) -> ExpectedNodes:
    options = parse_run([*line.split(), __file__], environ)
    context = LaunchContext() if options.nodes.hosts else detect_context(options, environ, str(home))
    found = expected_nodes(options, context, here, "node2")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("-n 2 -g 2,1 -i 1 --master node1", {}),
        ("-g 2,1 -i 1 --master node1", {}),
        ("--nnodes 2 --slots 2,1 --node-rank 1 --master-addr node1 --master-port 29500", {}),
        ("--hosts node1:2,node2:1", {}),
        ("--hosts node1:0-1,node2:3-3", {}),
        ("", ONE_A_RANK),
        ("-g 2,1", ONE_A_NODE),
        ("", BATCH),
    ],
)
def test_the_same_placement_from_each(line: str, environ: dict[str, str], tmp_path: Path) -> None:
    seats = seen(line, environ, tmp_path).seats
    assert seats is not None
    assert [(seat.rank, seat.placement.node_rank, seat.local_rank) for seat in seats] == SEATS


def test_workers_of_other_nodes_are_unknown_before_they_join(tmp_path: Path) -> None:
    found = seen("-n 2 -i 1 --master node1", {}, tmp_path, here=4)
    assert [(node.host, node.workers) for node in found.nodes] == [("node1", None), ("node2", 4)]
    assert found.seats is None


def test_by_hand(tmp_path: Path) -> None:
    rendezvous = look("-n 2 -g 8,2 -i 1 --master a:1234", {}, tmp_path).rendezvous
    assert rendezvous is not None
    assert (rendezvous.expected, rendezvous.member, rendezvous.leads) == (2, 1, False)
    assert (rendezvous.location.host, rendezvous.location.port, rendezvous.promised) == ("a", 1234, (8, 2))


def test_elastic_nodes_are_led_by_the_node_with_the_address(tmp_path: Path) -> None:
    rendezvous = look("-n 1:4 -i 0 --master a --spares 2 --last-call 9s", {}, tmp_path).rendezvous
    assert rendezvous is not None
    assert (rendezvous.least, rendezvous.expected, rendezvous.spares, rendezvous.timeouts.last_call) == (1, 4, 2, 9.0)
    assert rendezvous.elastic
    assert rendezvous.leads is None
    assert rendezvous.terms.settings["nodes"] == "1:4"
    fixed = look("-n 4 -i 0 --master a", {}, tmp_path).rendezvous
    assert fixed is not None
    assert not fixed.elastic


def test_a_spare_is_none_of_those_that_work(tmp_path: Path) -> None:
    found = seen("-n 2 --spares 1 -g 1 -i 2 --master node1", {}, tmp_path)
    assert [(node.host, node.workers) for node in found.nodes] == [("node1", 1), ("", 1)]


def test_nodes_of_a_scheduler_are_fixed(tmp_path: Path) -> None:
    options = parse_run(["-n", "1:2", "--spares", "1", "-g", "1", "--cpu", __file__], ONE_A_NODE)
    plan = make_plan(options, ONE_A_NODE, detect_context(options, ONE_A_NODE, str(tmp_path)))
    assert plan.remarks.notes == ("-n 1:2 --spares 1 has no effect: Slurm has started all the nodes there are",)


def test_torchruns_c10d_numbers_nodes_by_itself(tmp_path: Path) -> None:
    line = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1234 --rdzv-id job7"
    rendezvous = look(line, {}, tmp_path).rendezvous
    assert rendezvous is not None
    assert (rendezvous.member, rendezvous.leads, rendezvous.terms.run) == (None, None, "job7")


def test_one_task_a_rank(tmp_path: Path) -> None:
    rendezvous = look("", ONE_A_RANK, tmp_path).rendezvous
    assert rendezvous is not None
    assert (rendezvous.expected, rendezvous.member, rendezvous.leads, rendezvous.location.host) == (
        3,
        2,
        False,
        "node1",
    )
    assert rendezvous.location.port in range(20000, 30000)
    assert rendezvous.location.file is not None
    assert not rendezvous.echo


def test_one_task_a_node(tmp_path: Path) -> None:
    rendezvous = look("", ONE_A_NODE, tmp_path).rendezvous
    assert rendezvous is not None
    assert (rendezvous.expected, rendezvous.member) == (2, 1)


def test_the_leader_of_a_step_is_on_its_first_node_whatever_its_rank(tmp_path: Path) -> None:
    environ = {**ONE_A_RANK, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    rendezvous = look("", environ, tmp_path).rendezvous
    assert rendezvous is not None
    assert rendezvous.leads


def test_open_mpi_has_no_names_of_hosts(tmp_path: Path) -> None:
    rendezvous = look("", OPEN_MPI, tmp_path).rendezvous
    assert rendezvous is not None
    assert (rendezvous.expected, rendezvous.member, rendezvous.location.host, rendezvous.location.port) == (
        3,
        2,
        None,
        0,
    )
    assert rendezvous.location.file is not None


def test_a_batch_script_waits_for_a_srun(tmp_path: Path) -> None:
    context = look("", BATCH, tmp_path)
    assert context.allocation is not None
    assert context.rendezvous is None


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("", {}),
        ("--standalone", ONE_A_RANK),
        ("-n 1", ONE_A_RANK),
        ("--standalone", BATCH),
        ("", {**BATCH, "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}),
    ],
)
def test_a_single_node_needs_no_rendezvous(line: str, environ: dict[str, str], tmp_path: Path) -> None:
    assert look(line, environ, tmp_path) == LaunchContext()
    assert not list(tmp_path.iterdir())  # no token is created if none is needed


@pytest.mark.parametrize(
    ("line", "environ", "what"),
    [
        ("-n 3", ONE_A_NODE, "--nnodes 3 and Slurm, which has 2 nodes, contradict each other"),
        ("-n 2 -i 0 --master a", ONE_A_NODE, "--node-rank 0 and Slurm, where this is node 1, contradict each other"),
        ("--hosts a,b", ONE_A_NODE, "--hosts and Slurm both say where the ranks run"),
        (
            "-g 4",
            ONE_A_RANK,
            "4 workers were requested, but Slurm has started one task per rank (1 on this node)",
        ),
        ("-n 2 -g 2", {}, "2 nodes, but the address of node 0 is missing"),
        ("-n 2 -i 1", {}, "2 nodes, but the address of node 0 is missing"),
        ("-n 2 -g 2,1 --master a", {}, "-g 2,1 differs per node, and the index of this node is missing"),
        ("-n 1:2 --hosts a,b", {}, "-n 1:2 and --hosts a,b: nodes that are started over ssh"),
        ("--spares 1 --hosts a,b", {}, "--spares 1 and --hosts a,b: nodes that are started over ssh"),
        ("", {**OPEN_MPI, "PMIX_NAMESPACE": ""}, "Open MPI"),
    ],
)
def test_contradictions_name_both(line: str, environ: dict[str, str], what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        look(line, environ, tmp_path)
    assert what in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--master a --master-addr b -n 2 t.py", "--master a and --master-addr b both say where node 0 is"),
        ("--hosts a,b --hostfile f t.py", "--hosts and --hostfile contradict each other"),
        ("--hosts a,b -i 1 t.py", "contradict each other: from one terminal, or by hand on each node?"),
        ("--hosts a,b -n 3 t.py", "names 2 hosts, but -n 3"),
        ("--hosts a:2,b -g 4 t.py", "both say how many workers there are"),
        ("--hosts -oProxyCommand=x t.py", "--hosts"),
        ("--hostfile /nowhere t.py", "--hostfile /nowhere cannot be read"),
        ("--join-timeout 0 t.py", "--join-timeout"),
    ],
)
def test_options_that_cannot_be(line: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run(line.split(), {})
    assert what in str(caught.value)


def test_hosts_with_as_many_workers_each() -> None:
    options = parse_run(["--hosts", "a,b", "-g", "4", "t.py"], {})
    assert options.nodes.hosts is not None
    assert [(host.name, host.slots) for host in options.nodes.hosts] == [("a", 4), ("b", 4)]
