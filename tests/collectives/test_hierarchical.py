"""Groups across hosts: which ranks share a host, every collective with both kinds of memory, and a lost host."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.collectives import neighbours
from phalanx.collectives.errors import CollectiveTimeout
from phalanx.collectives.neighbours import Neighbours
from phalanx.forkserver.signed_store import SignedStore
from tests.collectives.ranks import ROOT, program
from tests.kit.lab import Lab

SCRIPTS = Path(__file__).parent / "scripts"


def test_machines_are_in_the_order_of_their_lowest_rank() -> None:
    assert neighbours.by_host(["b", "a", "b", "c", "a"], 4) == Neighbours(((0, 2), (1, 4), (3,)), 1)


def test_ranks_of_this_process_are_on_one_machine() -> None:
    store = dist.HashStore()
    found: list[Neighbours] = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(neighbours.find(SignedStore(store, ""), rank, 3, 60)))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Neighbours(((0, 1, 2),), 0)] * 3


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("host of 1", "elsewhere")
    with pytest.raises(CollectiveTimeout, match=r"a group of 4 ranks waited 0\.1 s for ranks 2 and 3 to join"):
        neighbours.find(SignedStore(store, ""), 0, 4, 0.1)


@pytest.mark.extended
def test_every_collective_where_machines_are_uneven_and_ranks_not_in_a_row() -> None:
    program("across", "results", "babca")


@pytest.mark.extended
def test_what_starts_in_one_profile_may_end_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With this library, a write to memory that a profile has freed always ends the rank. Without it, that is rare.
    guard = tmp_path / "freed_memory.so"
    source = Path(__file__).parent / "native" / "freed_memory.c"
    words = ["gcc", "-shared", "-fPIC", "-o", str(guard), str(source), "-ldl"]
    subprocess.run(words, check=True, timeout=300)
    monkeypatch.setenv("LD_PRELOAD", str(guard))
    program("across", "profiled")


@pytest.mark.extended
def test_a_rank_that_is_lost_or_late_or_calls_something_else_is_named_on_every_machine() -> None:
    failures: dict[str, dict[int, str]] = {}
    for line in program("across", "trouble").splitlines():
        name, rank, kind, text, seconds = json.loads(line)
        failures.setdefault(name, {})[rank] = f"{kind}: {text}" if kind else ""
        assert seconds < 40, line  # the timeout is 60
    everyone = {0, 1, 2, 3}
    for name, rank in {"the leader of the other machine dies": 2, "a rank of the other machine dies": 3}.items():
        assert failures[name].keys() == everyone - {rank}, failures[name]
        for text in failures[name].values():
            assert re.match(rf"PeerLost: all_reduce: .*rank {rank} has ended", text)
    assert failures["late"].pop(3) == ""
    assert failures["late"].keys() == everyone - {3}
    for text in failures["late"].values():
        assert re.match(r"CollectiveTimeout: all_reduce: rank 3 did not come within the timeout of 1 s", text)
    different = (
        "CollectiveMismatch: ranks called different things: rank 0 all_reduce of 100000 float32 (SUM), "
        "rank 2 broadcast of 32 bytes from rank 3"
    )
    # The root of a broadcast has already sent its data, and gets the error from its next call.
    assert failures["different calls"] == {**dict.fromkeys(everyone - {3}, different), 3: ""}
    assert {rank: text.partition(":")[0] for rank, text in failures["abort"].items()} == {
        **dict.fromkeys(everyone - {3}, "GroupAborted"),
        3: "",
    }
    assert failures["no message"][0].startswith("PeerLost: recv from rank 3: peer lost, it has ended")


def test_everything_on_two_hosts_and_then_one_is_lost(lab: Lab) -> None:
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": lab[0].address, "MASTER_PORT": "4000", "OMP_NUM_THREADS": "1"}
    words = (sys.executable, "-W", "ignore", str(SCRIPTS / "everything.py"), "shm", "1", "dies")
    jobs = [
        lab[host].start(words=words, env={**env, "RANK": str(rank), "PYTHONPATH": f"{ROOT}/src"})
        for rank, host in enumerate((0, 1, 0))
    ]
    ends = [job.wait(170) for job in jobs]
    assert ends == [0, -signal.SIGKILL, 0], "\n".join(job.both for job in jobs)
    for rank, job in enumerate(jobs):
        assert f"rank {rank} of 3: all as it should be, by shm" in job.out
    for job in (jobs[0], jobs[2]):
        assert "PeerLost: all_reduce: rank 1 on another host has ended, or cannot be reached" in job.out
