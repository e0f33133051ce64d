"""Several nodes started by hand: one job, whatever names, networks and numbers of ranks the nodes have."""

from __future__ import annotations

import ipaddress
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import PLAIN, all_gone, codes, texts, together
from tests.e2e.places import READY, script
from tests.kit import proc
from tests.kit.cli import TORCHRUN, until
from tests.kit.handle import Handle
from tests.kit.lab import Lab, Node

Reports = dict[int, dict[str, Any]]


def reports(folder: Path) -> Reports:
    """Return the report of each rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def environments(lab: Lab, folder: Path, *options: str, ranks: tuple[int, ...] = (1, 1)) -> Reports:
    """Return the environments of a run without torch."""
    folder.mkdir()
    jobs = together(lab, *PLAIN, *options, script("environment.py"), str(folder), ranks=ranks)
    assert codes(jobs) == [0] * len(ranks), texts(jobs)
    return reports(folder)


def output(job: Handle) -> Path:
    """Return the folder that a node prints as its own."""
    return Path(job.wait_for(re.compile(r"output in (\S+)"))[0][1])


def block(job: Handle) -> str:
    """Return the message of phalanx about the first cause."""
    return job.err[job.err.rindex("phalanx: rank") :]


def listening(node: Node) -> set[str]:
    """Return the addresses at which processes of phalanx listen on a node.

    torch's store listens on loopback behind its gate: tests/launcher/workers/test_store_access.py checks access to it.
    """
    ours = {inode for pid, command in node.processes() if sys.executable in command for inode in proc.sockets(str(pid))}
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{node.init}/net/{table}").read_text().splitlines()[1:]]
        found |= {_address(row[1]) for row in rows if row[3] == proc.LISTEN and row[9] in ours}
    return found


def _address(text: str) -> str:
    """Return an address in the kernel's notation: words of four bytes, each in the byte order of the machine."""
    raw = bytes.fromhex(text.partition(":")[0])
    return str(ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


# -- the environment of ranks


@pytest.mark.warmed
def test_every_rank_of_uneven_nodes_knows_its_place(lab: Lab, tmp_path: Path) -> None:
    jobs = together(lab, "--cpu", script("census.py"), str(tmp_path), env={"NCCL_SOCKET_IFNAME": "mine"})
    assert codes(jobs) == [0, 0], texts(jobs)
    found = reports(tmp_path)
    assert sorted(found) == [0, 1, 2]
    places = {0: (0, 0, 2), 1: (0, 1, 2), 2: (1, 0, 1)}  # node, local rank, ranks of the node
    ports = set()
    for rank, (node, local, size) in places.items():
        env = found[rank]["env"]
        expected = {
            "RANK": rank,
            "WORLD_SIZE": 3,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": 2,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 3,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "MASTER_ADDR": lab[0].address,
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "mine",  # the user's own is not changed
        }
        assert {name: env.get(name) for name in expected} == {name: str(value) for name, value in expected.items()}
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1
    assert len({found[rank]["env"]["PHALANX_RUN"] for rank in found}) == 1
    # phalanx.topology(), and the groups that it creates: every rank adds ten to the power of its number.
    assert [found[rank]["world"] for rank in range(3)] == [111, 111, 111]
    assert [found[rank]["local"] for rank in range(3)] == [11, 11, 100]
    assert [found[rank]["leaders"] for rank in range(3)] == [101, None, 101]
    assert [found[rank]["node_rank"] for rank in range(3)] == [0, 0, 1]
    assert [found[rank]["local_rank"] for rank in range(3)] == [0, 1, 0]
    assert [found[rank]["local_ranks"] for rank in range(3)] == [[0, 1], [0, 1], [2]]
    assert [found[rank]["leader_ranks"] for rank in range(3)] == [[0, 2]] * 3


def test_interfaces_are_those_that_lead_to_the_others(lab: Lab, tmp_path: Path) -> None:
    for place, node in enumerate(lab, 1):
        node.add_interface("ib0", f"10.88.0.{place}/24")
    same = ("-n", "2", "-g", "1", *PLAIN)
    for master, interface, address in (("node1", "eth0", "10.77.0.1"), ("10.88.0.1", "ib0", "10.88.0.1")):
        folder = tmp_path / interface
        folder.mkdir()
        words = (*same, "--master", master, script("environment.py"), str(folder))
        jobs = [lab[place].start("run", "-i", str(place), *words) for place in (0, 1)]
        assert codes(jobs) == [0, 0], texts(jobs)
        for env in reports(folder).values():
            assert env["MASTER_ADDR"] == address
            assert env["GLOO_SOCKET_IFNAME"] == env["TP_SOCKET_IFNAME"] == interface
            assert env["NCCL_SOCKET_IFNAME"] == f"={interface}"  # only this one, not all with this prefix


def test_a_user_who_chose_an_interface_has_it(lab: Lab, tmp_path: Path) -> None:
    for place, node in enumerate(lab, 1):
        node.add_interface("ib0", f"10.88.0.{place}/24")
    own = {"GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "lo"}
    jobs = together(lab, *PLAIN, script("environment.py"), str(tmp_path), ranks=(1, 1), env=own)
    assert codes(jobs) == [0, 0], texts(jobs)
    for env in reports(tmp_path).values():
        assert {name: env[name] for name in own} == own
        assert env["NCCL_SOCKET_IFNAME"] == "=eth0"


# -- torchrun's flags


def test_flags_of_torchrun_for_nodes_that_are_numbered(lab: Lab, tmp_path: Path) -> None:
    words = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "node1", "--master-port", "29555")
    jobs = [
        lab[place].start("run", *PLAIN, *words, "--node-rank", str(place), script("environment.py"), str(tmp_path))
        for place in (1, 0)
    ]
    jobs[1].wait_for("meeting at 10.77.0.1:29555")
    assert codes(jobs) == [0, 0], texts(jobs)
    found = reports(tmp_path)
    assert [(found[rank]["GROUP_RANK"], found[rank]["LOCAL_RANK"]) for rank in range(4)] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]


def test_flags_of_torchrun_for_nodes_that_are_not_numbered(lab: Lab, tmp_path: Path) -> None:
    words = ("--nnodes=3", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400", "--rdzv-id=job7")
    jobs = [lab[place].start("run", *PLAIN, *words, script("environment.py"), str(tmp_path)) for place in (2, 0, 1)]
    assert codes(jobs) == [0, 0, 0], texts(jobs)
    found = reports(tmp_path)
    assert sorted(found) == [0, 1, 2]
    for env in found.values():
        assert env["TORCHELASTIC_RUN_ID"] == "job7"
        assert (env["WORLD_SIZE"], env["GROUP_WORLD_SIZE"], env["MASTER_ADDR"]) == ("3", "3", "10.77.0.1")
    assert [found[rank]["GROUP_RANK"] for rank in range(3)] == ["0", "1", "2"]
    assert "meeting at 10.77.0.1:29400" in jobs[1].err  # the node with the address leads


# -- names and networks


@pytest.mark.warmed
def test_a_host_whose_name_resolves_to_127_0_1_1(lab: Lab, tmp_path: Path) -> None:
    """Debian's hosts file, on every node. For comparison, torchrun under the same conditions."""
    for node in lab:
        node.hosts("bad")
    jobs = together(lab, "--cpu", script("impatient.py"), "300")
    assert codes(jobs) == [0, 0], texts(jobs)
    assert jobs[0].out.count("sum 6\n") == 3
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "node1", "--master-port", "29555")
    theirs = [
        lab[place].start(
            words=(*TORCHRUN, *words, "--node-rank", str(place), script("impatient.py"), "15"),
            env={"TMPDIR": str(tmp_path)},
        )
        for place in (0, 1)
    ]
    # Half a minute later the other one fails, too; the first is enough.
    failed = until(lambda: [job for job in theirs if job.process.poll() is not None], 60, "one of them to end")[0]
    assert failed.wait() == 1
    assert "127.0.1.1" in failed.err
    assert "sum" not in theirs[0].out + theirs[1].out


def test_a_host_that_does_not_know_its_own_name(lab: Lab, tmp_path: Path) -> None:
    for node in lab:
        node.hosts("none")
    found = environments(lab, tmp_path / "out", ranks=(1, 1, 1))
    assert [env["MASTER_ADDR"] for env in found.values()] == [lab[0].address] * 3


@pytest.mark.warmed
def test_ipv6_alone(lab: Lab, tmp_path: Path) -> None:
    for node in lab:
        node.ipv6_only()
    jobs = together(lab, "--cpu", script("census.py"), str(tmp_path), ranks=(1, 1))
    assert codes(jobs) == [0, 0], texts(jobs)
    for report in reports(tmp_path).values():
        assert report["world"] == 11
        assert report["env"]["MASTER_ADDR"] == lab[0].address6
        assert report["env"]["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.warmed
def test_ports_listen_only_on_the_address_that_is_needed(lab: Lab) -> None:
    """Also: `phalanx ps` shows the run on each of its nodes, and Ctrl-C at node 0 ends it on both."""
    for place, node in enumerate(lab, 1):
        node.add_interface("ib0", f"10.88.0.{place}/24")
    jobs = together(lab, "--cpu", script("sleepy.py"))
    jobs[0].wait_for(READY, 3)
    assert {one for one in listening(lab[0]) if not is_loopback(one)} == {lab[0].address}
    assert listening(lab[1]) == set()
    run = output(jobs[0]).name
    for node in list(lab)[:2]:
        seen = node.run("ps").out
        assert re.search(rf"^{run}\S* +running", seen, re.M), f"{node.name}: {seen}"
    assert lab[2].run("ps").out == "nothing is running\n"
    jobs[0].signal(signal.SIGINT)
    assert codes(jobs) == [130, 130], texts(jobs)
    all_gone(lab)


@pytest.mark.parametrize("way", [(), ("--standalone",), ("--nnodes", "1")], ids=" ".join)
def test_one_node_listens_on_loopback_alone(lab: Lab, way: tuple[str, ...]) -> None:
    job = lab[0].start("run", *PLAIN, "-g", "1", *way, script("sleepy.py"))
    job.wait_for(READY)
    assert listening(lab[0])
    assert all(map(is_loopback, listening(lab[0])))
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


# -- how it ends


def test_sigterm_at_a_member_ends_the_job_everywhere(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("sleepy.py"))
    jobs[0].wait_for(READY, 3)
    jobs[1].signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143], texts(jobs)
    assert "node 1 (node2) received SIGTERM" in jobs[0].err
    all_gone(lab)


def test_ctrl_c_in_the_terminal_of_node_0(lab: Lab) -> None:
    words = ("-n", "2", "-g", "1", "--master", "node1", *PLAIN, script("sleepy.py"))
    leader = lab[0].terminal("run", "-i", "0", *words)
    member = lab[1].start("run", "-i", "1", *words)
    leader.wait_for(READY, 2)
    leader.send(b"\x03")
    assert codes([leader, member]) == [130, 130], texts([leader, member])
    all_gone(lab)


@pytest.mark.parametrize(("rank", "place"), [(1, ""), (2, "on node 1 (node2)"), (3, "on node 2 (node3)")])
def test_a_rank_that_exits_ends_all_nodes_with_its_code(lab: Lab, rank: int, place: str) -> None:
    jobs = together(lab, *PLAIN, script("quit.py"), str(rank), "7", ranks=(2, 1, 1))
    assert codes(jobs) == [7, 7, 7], texts(jobs)
    for job in jobs:
        report = block(job)
        assert report.startswith(f"phalanx: rank {rank} failed: sys.exit(7)\n"), texts(jobs)
        assert place in report, texts(jobs)
    all_gone(lab)


def test_an_exception_on_another_node_is_reported_at_node_0(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("boom.py"), "2", home="own")
    assert codes(jobs) == [1, 1], texts(jobs)
    for job in jobs:
        report = block(job)
        assert report.startswith("phalanx: rank 2 failed: BadBatch: no shard called 'evaluate': é ü 数\n")
        assert "boom.py:20 in step" in report
        assert f"all of its output: {output(jobs[1])}/attempt_0/2" in report
        assert "on node 1 (node2)" in report
    all_gone(lab)


@pytest.mark.warmed
def test_ranks_that_fail_because_a_peer_elsewhere_is_gone_are_not_the_cause(lab: Lab) -> None:
    jobs = together(lab, "--cpu", script("peer_gone.py"), "2")
    assert codes(jobs) == [1, 1], texts(jobs)
    for job in jobs:
        assert block(job).startswith("phalanx: rank 2 failed: ValueError: the reason\n"), texts(jobs)
    all_gone(lab)


@pytest.mark.warmed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_early_is_to_blame_and_not_the_only_one_of_another_node(lab: Lab, rank: int) -> None:
    jobs = together(lab, "--cpu", script("peer_gone.py"), str(rank), "leaves", ranks=(1, 1))
    assert codes(jobs) == [1, 1], texts(jobs)
    for job in jobs:
        lines = block(job).splitlines()
        assert lines[0] == f"phalanx: rank {rank} exited, with exit code 0, while rank {1 - rank} still needed it"
        assert lines[2].startswith(f"  rank {1 - rank} lost the peer: "), texts(jobs)
    all_gone(lab)


@pytest.mark.parametrize("rank", [0, 2])
def test_no_node_waits_for_a_group_without_a_rank_that_left(lab: Lab, rank: int) -> None:
    """Without a message, the ranks of other nodes would wait for a new group for longer than --node-timeout."""
    jobs = together(lab, "--cpu", "--node-timeout", "1h", script("leaves.py"), str(rank), ranks=(1, 1, 1))
    assert codes(jobs) == [1, 1, 1], texts(jobs)
    for job in jobs:
        assert block(job).startswith(f"phalanx: rank {rank} exited in the middle of the training, "), texts(jobs)
    all_gone(lab)


def test_ps_counts_the_ranks_of_all_nodes_on_every_node(lab: Lab, tmp_path: Path) -> None:
    end = tmp_path / "end"
    jobs = together(lab, *PLAIN, script("until_file.py"), str(end), ranks=(2, 1, 2), home="own")
    until(lambda: len(re.findall(r"ready \d", jobs[0].out)) == 5, 60, "all ranks")
    for node in lab:
        titles, *runs = (line.split() for line in node.run("ps", home="own").out.splitlines())
        assert [run[titles.index("RANKS")] for run in runs] == ["5"], node
    end.touch()
    assert codes(jobs) == [0, 0, 0], texts(jobs)
    for node in lab:
        (run,) = map(json.loads, node.run("ps", "--all", "--json", home="own").out.splitlines())
        assert run["world_size"] == 5, node
    all_gone(lab)


@pytest.mark.warmed
def test_a_restart_is_one_of_all_nodes(lab: Lab) -> None:
    jobs = together(lab, "--cpu", "--max-restarts", "1", script("second_try.py"), "2")
    assert codes(jobs) == [0, 0], texts(jobs)
    assert "phalanx: rank 2 failed: sys.exit(7)" in jobs[0].err
    assert "starting all ranks again: restart 1 of 1" in jobs[0].err
    second = re.findall(r"attempt 1 rank \d sum 6$", jobs[0].out, re.M)
    assert sorted(second) == [f"attempt 1 rank {rank} sum 6" for rank in range(3)]
    assert "attempt 1 rank 2 sum 6" in jobs[1].out


def test_restarts_that_are_used_up(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, "--max-restarts", "1", script("quit.py"), "2", "9")
    assert codes(jobs) == [9, 9], texts(jobs)
    assert jobs[0].err.count("rank 2 failed: sys.exit(9)") == 2


# -- output


def test_output_of_all_ranks_is_shown_at_node_0_and_kept_where_it_was_written(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, script("hello.py"), home="own")
    assert codes(jobs) == [0, 0], texts(jobs)
    assert sorted(jobs[0].out.splitlines()) == [f"[{rank}] hello {rank} of 3" for rank in range(3)]
    assert jobs[1].out == "[2] hello 2 of 3\n"
    for place, rank in ((0, 0), (0, 1), (1, 2)):
        log = output(jobs[place]) / "attempt_0" / str(rank) / "stdout.log"
        assert log.read_text() == f"hello {rank} of 3\n"


def test_a_member_that_writes_very_much_is_not_slowed_down_and_what_is_left_out_is_said(lab: Lab) -> None:
    lines = 500_000  # 50 MB
    jobs = together(lab, *PLAIN, script("loud.py"), "2", str(lines))
    assert codes(jobs) == [0, 0], texts(jobs)
    assert all(job.ended and job.ended - job.started < 20 * proc.SLOWEST for job in jobs)
    expected = "".join(f"line {number:08d} ".ljust(99, "x") + "\n" for number in range(lines)) + "end 2\n"
    log = output(jobs[1]) / "attempt_0" / "2" / "stdout.log"
    assert log.read_text() == expected
    # At node 0: whole lines in order, including the last ones, and how much is missing between.
    shown = re.findall(r"^\[2\] line (\d{8}) x{85}$", jobs[0].out, re.M)
    assert shown == sorted(shown)
    assert 100 < len(shown) < lines / 2
    assert shown[-1] == f"{lines - 1:08d}"
    assert "[2] end 2\n" in jobs[0].out
    left_out = sum(
        map(int, re.findall(r"… (\d+) bytes are left out here; all of it is in the log on node2", jobs[0].out))
    )
    assert left_out + 100 * len(shown) + len("end 2\n") == len(expected)


@pytest.mark.warmed
def test_a_rank_that_did_not_come_is_named_on_whatever_node_it_is(lab: Lab, tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import time, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1)); dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))\n"
        "if dist.get_rank() == 2: time.sleep(1000)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    jobs = together(lab, "--cpu", str(late), ranks=(2, 1))
    assert codes(jobs) == [1, 1], texts(jobs)
    for job in jobs:
        report = block(job)
        assert report.startswith(
            "phalanx: rank 2 did not reach all_reduce #2 (4 B) at late.py:6 within 5 s: it was sleeping"
        )
        assert re.search(r"\n  afterwards: rank [01] failed in the same way\n", report), report


@pytest.mark.parametrize("way", [(), ("--fresh",)], ids=["cold", "fresh"])
def test_ranks_that_failed_are_counted_on_all_nodes(lab: Lab, tmp_path: Path, way: tuple[str, ...]) -> None:
    late = tmp_path / "fail.py"
    late.write_text(
        "import atexit, os, time\n"
        "rank, folder = int(os.environ['RANK']), os.path.dirname(__file__)\n"
        "if rank < 3:\n"
        "    open(f'{folder}/{rank}', 'w').close()\n"
        "    while len(os.listdir(folder)) < 4: time.sleep(0.01)\n"
        "    # All raise before the first of them has ended: one that is stopped first has not failed by itself.\n"
        "    atexit.register(time.sleep, 2)\n"
        "    raise ValueError(rank)\n"
        "time.sleep(1000)\n"
    )
    jobs = together(lab, "--cpu", *way, str(late), ranks=(2, 2))
    assert codes(jobs) == [1, 1], texts(jobs)
    assert "Traceback" not in str(texts(jobs))  # also those of the other node: the block says the same
    report = block(jobs[0])
    assert re.search(r"\n  afterwards: ranks (0, 1|0, 2|1, 2) failed in the same way\n", report), texts(jobs)
    assert report.count("afterwards:") == 1
