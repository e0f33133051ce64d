"""Real groups, started in every way; and how they end."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.errors import DeviceError, JoinError, UsageError
from phalanx.forkserver.signed_store import SignedStore
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.rendezvous.device import backend_for
from phalanx.worker.rendezvous.identity import Identity
from phalanx.worker.rendezvous.membership import Membership
from phalanx.worker.rendezvous.methods import MeetingPoint
from phalanx.worker.rendezvous.roll_call import Participant, placement, topology
from tests.kit.cli import PYTHON, free_port, phalanx, run, torchrun
from tests.worker.ranks import ended, plain, ranks

SCRIPTS = Path(__file__).parent / "scripts"
EVERYTHING = str(SCRIPTS / "everything.py")
ENDING = str(SCRIPTS / "ending.py")
MEETING = str(SCRIPTS / "meeting.py")


def lines(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d+ of .*", text))


def expected(count: int, launcher: str, backend: str = "shm") -> list[str]:
    return [
        f"rank {rank} of {count}, local {rank} of {count}, node 0 of 1, {backend} on cpu, by {launcher}"
        for rank in range(count)
    ]


# -- how ranks are started


@pytest.mark.imported
def test_by_hand(tmp_path: Path) -> None:
    text = ended(ranks(3, EVERYTHING, env={"JOIN_FOLDER": str(tmp_path)}))
    assert lines(text) == expected(3, "hand-set variables")
    assert text.count("printed once") == 1


@pytest.mark.warmed
def test_by_phalanx_run(tmp_path: Path) -> None:
    result = phalanx("run", "--cpu", "-g", "2", EVERYTHING, env={"JOIN_FOLDER": str(tmp_path)})
    assert result.code == 0, result.err
    assert lines(result.out) == expected(2, "phalanx run")
    assert "destroy_process_group" not in result.err


@pytest.mark.extended
def test_by_torchrun(tmp_path: Path) -> None:
    result = torchrun("--nproc-per-node", "2", EVERYTHING, env={"JOIN_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert result.code == 0, result.err
    assert lines(result.out) == expected(2, "torchrun")
    assert result.err == ""


@pytest.mark.extended
def test_by_accelerate(tmp_path: Path) -> None:
    # Without a GPU, Accelerate starts several processes only with these options.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    words = (*PYTHON, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", str(free_port()))
    # Accelerate calls torchrun, which leaves a log directory.
    env = {"JOIN_FOLDER": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = run((*words, EVERYTHING), timeout=150, env=env)
    assert result.code == 0, result.err
    assert lines(result.out) == expected(2, "accelerate launch")
    assert "destroy_process_group" not in result.err


@pytest.mark.imported
def test_by_a_store_of_the_scripts_own() -> None:
    text = ended(ranks(2, EVERYTHING, json.dumps({"store_port": free_port()}), env={"MASTER_PORT": None}))
    assert lines(text) == expected(2, "hand-set variables")


@pytest.mark.imported
def test_by_tcp_and_arguments() -> None:
    port = free_port()
    each = [[json.dumps({"method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2})] for rank in range(2)]
    env = {"WORLD_SIZE": None, "RANK": None, "MASTER_PORT": None}
    jobs = [plain(EVERYTHING, *words, env=env) for words in each]
    assert lines(ended(jobs)) == expected(2, "arguments")


@pytest.mark.imported
def test_by_a_file(tmp_path: Path) -> None:
    text = ended(ranks(2, EVERYTHING, json.dumps({"method": f"file://{tmp_path}/meet"})))
    assert lines(text) == expected(2, "hand-set variables")
    assert not (tmp_path / "meet").exists()


# -- one process


def test_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import torch.distributed as dist

    with WorkerProcessGroup.join(device="cpu", timeout=timedelta(minutes=1)) as group:
        dist.all_reduce(torch.ones(1))  # a group of one: the script runs unchanged in one process
        assert (group.rank, group.world_size, group.local_rank, group.nodes, group.launcher) == (0, 1, 0, 1, "nobody")
        sums = group.sum({"a": 1, "b": 1.0, "c": torch.tensor(2), "d": torch.tensor([2.0]), "e": True})
        assert repr((group.mean(3), group.max(2.5), group.max(7))) == "(3.0, 2.5, 7)"
        assert repr(sums) == "{'a': 1, 'b': 1.0, 'c': 2, 'd': 2.0, 'e': 1}"  # ints stay ints
        assert (group.broadcast({"a": 1}), group.gather("x"), group.gather("x", all=True)) == ({"a": 1}, ["x"], ["x"])
        group.barrier()
        with group.first() as leads:
            assert leads
        group.print("one", "line")
        assert capsys.readouterr().out == "one line\n"
        group.store.set("a", "1")
        assert group.store.get("a") == b"1"
        group.store.wait(["a"])
        assert group.store.check(["a"], "a")
        assert group.store.add("n", 2) == 2
        assert (group.store.delete("a"), group.store.check("a")) == (True, False)
        with pytest.raises(Exception, match=r"'b' was not set in the store in 0\.05 s"):
            group.store.get("b", timeout=0.05)
        with pytest.raises(UsageError, match="not a tensor of shape"):
            group.mean(group.generator.get_state())
        with pytest.raises(UsageError, match=r"sum takes a number or a dict of them, not 'many'"):
            group.sum({"a": "many"})
        with pytest.raises(UsageError, match="not sent between processes"):
            group.broadcast(object())


def test_hooks_before_the_end() -> None:
    called: list[str] = []

    class Holder:
        def let_go(self) -> None:
            called.append("method")

    kept, lost = Holder(), Holder()
    group = WorkerProcessGroup.join(device="cpu")
    group.before_close(lambda: called.append("function"))
    group.before_close(kept.let_go)
    group.before_close(lost.let_go)
    del lost
    group.close()
    group.close()
    assert called == ["method", "function"]


@pytest.mark.imported
def test_a_group_of_one_where_it_is_asked_for() -> None:
    result = plain(EVERYTHING, json.dumps({"backend": "gloo"}))
    assert result.wait() == 0, result.err
    assert lines(result.out) == expected(1, "nobody", "gloo")


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"method": "tcp://127.0.0.1:1"}, "the rank and the world size are not known"),
        ({"method": "file:///x", "store": object()}, "both say where to meet"),
        ({"store": "tcp"}, "store='tcp' is not a store of torch.distributed"),
        ({"timeout": 0}, "is not a valid timeout"),
        ({"timeout": "5 minutes"}, "is not a valid timeout"),
        ({"timeout": math.inf}, "is not a valid timeout"),
        ({"backend": "ucc"}, "this PyTorch was built without ucc"),
        (
            {"backend": "cpu:shm,cuda:nccl"},
            "shm is for the CPU, and cannot be combined with|built without nccl",
        ),
        ({"backend": "cuda:shm"}, "shm is for the CPU"),
        ({"backend": "infiniband"}, "the backend 'infiniband' is not known"),
        ({"backend": "gloo,nccl"}, "not known|built without"),
        ({"backend": "cpu:gloo,cuda:what"}, "not known"),
        ({"device": "gpu"}, "device='gpu' is not a device"),
        ({"device": "cuda:99"}, "a CUDA device was asked for, but there is none|there is no cuda:99"),
    ],
)
def test_contradicting_arguments_are_refused(options: dict[str, Any], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        WorkerProcessGroup.join(**options)


@pytest.mark.parametrize(
    ("asked", "own", "kinds", "chosen"),
    [
        (None, "cpu", ["cpu", "cpu"], "shm"),
        (None, "cpu", ["cpu", "cuda"], "gloo"),  # the other rank uses gloo besides NCCL
        ("gloo", "cpu", ["cpu", "cpu"], "gloo"),
        ("cpu:gloo", "cpu", ["cpu", "cpu"], "cpu:gloo"),
        ("SHM", "cpu", ["cpu", "cpu"], "shm"),
    ],
)
def test_all_ranks_choose_the_same_backend(asked: str | None, own: str, kinds: list[str], chosen: str) -> None:
    import torch

    assert backend_for(asked, torch.device(own), kinds, ["here"] * len(kinds)) == chosen


@pytest.mark.parametrize(
    ("asked", "machines", "chosen"),
    [
        (None, ["here"], "shm"),
        (None, ["here", "there"], "gloo"),
        ("shm", ["here", "there"], "shm"),
        (None, ["here", "there", "here"], "shm"),
        ("gloo", ["here", "there", "here"], "gloo"),
    ],
)
def test_memory_is_shared_where_there_is_anybody_to_share_it_with(
    asked: str | None, machines: list[str], chosen: str
) -> None:
    import torch

    assert backend_for(asked, torch.device("cpu"), ["cpu"] * len(machines), machines) == chosen


def test_shared_memory_is_not_for_a_gpu() -> None:
    import torch

    with pytest.raises(DeviceError, match="shm works between CPUs, but this rank computes on cuda:0"):
        backend_for("shm", torch.device("cuda:0"))


def member(rank: int, store: Any) -> WorkerProcessGroup:
    """Join as one of two ranks that share a store but have no process group."""
    import torch

    identity = Identity("hand-set variables", PartialPlacement(rank=rank, world_size=2))
    people = tuple(Participant(PartialPlacement(rank=one, world_size=2), "a", "a", 1) for one in range(2))
    place, where = MeetingPoint("given"), topology(people, rank)
    return WorkerProcessGroup(
        Membership(
            identity,
            people,
            where,
            placement(people, where),
            torch.device("cpu"),
            "",
            SignedStore(store, ""),
            False,
            place,
            False,
            10,
        )
    )


def test_the_first_one_goes_in_alone() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    leader, other = member(0, store), member(1, store)
    inside = threading.Event()

    def follow() -> None:
        with other.first() as leads:
            assert not leads
            inside.set()

    following = threading.Thread(target=follow)
    with leader.first() as leads:
        assert leads
        following.start()
        assert not inside.wait(0.2)
    following.join(10)
    assert inside.is_set()


def test_the_first_one_fails() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    leader, other = member(0, store), member(1, store)
    with pytest.raises(OSError, match="no disk"), leader.first():
        raise OSError("no disk")
    with pytest.raises(JoinError, match="rank 0, which went first, failed: OSError: no disk"), other.first():
        raise AssertionError("the second one went in")


# -- missing ranks


@pytest.mark.imported
def test_the_missing_rank_is_named() -> None:
    env = {"WORLD_SIZE": "3", "MASTER_PORT": str(free_port()), "JOIN_TIMEOUT": "10"}
    jobs = [plain(ENDING, "nothing", env={**env, "RANK": rank}) for rank in ("0", "2")]
    for job in jobs:
        assert job.wait() == 1
        assert "JoinError: 1 of 3 ranks did not come in 10 s: rank 1" in job.err, job.err
        for rank, other in zip((0, 2), jobs, strict=True):
            assert re.search(rf"here: rank {rank} on \S+( \(\S+\))?, pid {other.pid}\b", job.err), job.err
        assert f"they meet at 127.0.0.1 port {env['MASTER_PORT']}" in job.err
    assert "phalanx: rank 0 waits for rank 1" in jobs[0].err


@pytest.mark.imported
def test_the_rank_that_keeps_the_store_dies_while_others_are_missing() -> None:
    env = {"WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}
    jobs = [plain(MEETING, env={**env, "RANK": rank}) for rank in ("0", "1")]
    jobs[0].wait_for("rank 0 waits for rank 2 at 127.0.0.1 port")
    jobs[0].signal(signal.SIGKILL)
    assert jobs[1].wait() == 0
    assert "the store is gone: the process that hosted it ended while rank 1 waited for the others" in jobs[1].out, (
        jobs[1].both
    )


SECOND = """
import torch, torch.distributed as dist
from phalanx.worker.process_group.group import WorkerProcessGroup
for _ in range(2):
    group = WorkerProcessGroup.join("gloo", device="cpu")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    print(backend.options.global_ranks_in_group)
    group.close()
"""


@pytest.mark.extended
def test_the_backend_of_a_second_default_group_knows_its_ranks() -> None:
    """torch itself knows them only for the first group of a process, and crashes when a later one is split."""
    result = run((*PYTHON, "-c", SECOND), timeout=60)
    assert (result.code, result.out) == (0, "[0]\n[0]\n"), result.err
