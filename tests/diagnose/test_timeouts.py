"""Which rank caused a timeout: tables of messages, and of evidence in which the victim waits where it timed out."""

from __future__ import annotations

import pytest

from phalanx.diagnose.absent import blame
from phalanx.diagnose.evidence import CallEvidence, Evidence
from phalanx.diagnose.rules.collectives.timeouts import Timeout, read
from tests.diagnose.made_evidence import C10D, behind, beside, call, collective, evidence, frame, process, rank, waiting

GLOO = "RuntimeError: [third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
NCCL = (
    "[rank0]:[E514 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for long"
)

MESSAGES = {
    "gloo": (GLOO + "Timed out waiting 4000ms for recv operation to complete", Timeout(seconds=4.0)),
    "monitored barrier": (
        f"RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms\n Original exception:\n{GLOO}"
        "Timed out waiting 3000ms for recv operation to complete",
        Timeout(seconds=3.0, ranks=(1,)),
    ),
    "several": (
        "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms",
        Timeout(seconds=3.0, ranks=(1, 3)),
    ),
    "a key": (
        "DistStoreError: wait timeout after 3000ms, keys: /default_pg/0//never",
        Timeout(seconds=3.0, key="never"),
    ),
    "clients": (
        "DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined.",
        Timeout(seconds=6.0),
    ),
    "an address": (
        "DistNetworkError: The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, 29500).",
        Timeout(seconds=5.0, address="127.0.0.1:29500"),
    ),
    "our own": (
        "CollectiveTimeout: all_reduce: rank 1 did not come within the timeout of 3 s",
        Timeout(seconds=3.0, ranks=(1,)),
    ),
    "our own, several": (
        "CollectiveTimeout: barrier: ranks 1, 2 and 5 did not come within the timeout of 0.5 s",
        Timeout(seconds=0.5, ranks=(1, 2, 5)),
    ),
    "NCCL's watchdog": (NCCL, Timeout(seconds=600.0, op="all_reduce", seq=5, group="0")),
    "NCCL's watchdog, without the name of its group": (
        NCCL.replace("[PG ID 0 PG GUID 0(default_pg) Rank 0]", "[Rank 0]"),
        Timeout(seconds=600.0, op="all_reduce", seq=5, group="0"),
    ),
    "another timeout": ("TimeoutError: The read operation timed out", None),
    "a lost peer": (GLOO + "Connection closed by peer", None),
}


@pytest.mark.parametrize(("text", "timeout"), MESSAGES.values(), ids=MESSAGES.keys())
def test_timeouts_are_read_from_messages(text: str, timeout: Timeout | None) -> None:
    assert read(text) == timeout


THERE = "rank 1 did not reach all_reduce #214 (6.5 MB) at train.py:52 within 5 s: it was"
LOAD = frame("train.py", 8, "load", source="time.sleep(1000)")
FIVE = Timeout(seconds=5.0)
JOIN = frame(C10D, 1899, "init_process_group")

CASES: dict[str, tuple[Evidence, Timeout, list[str]]] = {
    "sleeping": (
        beside(behind(1, [LOAD])),
        FIVE,
        [f"{THERE} sleeping at train.py:8 in load", "its line: time.sleep(1000)"],
    ),
    "computing, which is no fault by itself": (
        beside(behind(1, [frame("train.py", 9, "evaluate")], busy=True, proc=process("R"))),
        FIVE,
        [f"{THERE} at work at train.py:9 in evaluate"],
    ),
    "two of them, at one place": (
        beside(behind(1, [LOAD]), behind(2, [LOAD])),
        FIVE,
        ["ranks 1, 2 did not reach all_reduce #214 (6.5 MB) at train.py:52 within 5 s: they were sleeping at"],
    ),
    "two of them, at two places": (
        beside(behind(1, [LOAD]), behind(2, [frame("train.py", 9, "evaluate")], busy=True, proc=process("R"))),
        FIVE,
        ["rank 1 did not reach all_reduce #214", "rank 2: it was at work at train.py:9 in evaluate"],
    ),
    "its steps take longer than the timeout": (
        evidence(
            waiting(0, size=2, usual=60.0, since=5.0), behind(1, [LOAD], size=2, usual=60.0, since=5.0), waited=5.0
        ),
        FIVE,
        ["rank 1 did not reach all_reduce #214"],
    ),
    "a short one": (
        evidence(waiting(0, size=2, since=0.5), behind(1, [LOAD], size=2, since=0.5), waited=0.5),
        Timeout(seconds=0.5),
        ["rank 1 did not reach all_reduce #214"],
    ),
    "killed": (
        beside(behind(1, [], ended=-9)),
        FIVE,
        [f"{THERE} killed by SIGKILL"],
    ),
    "stopped": (
        beside(behind(1, [LOAD], proc=process("T"))),
        FIVE,
        ["rank 1 is stopped (SIGSTOP) at train.py:8 in load; the other 3 wait for it in all_reduce #214"],
    ),
    "it skipped one, and waits in another": (
        beside(waiting(1, "broadcast", line=77)),
        FIVE,
        ["rank 1 called broadcast at train.py:77 where the other 3 called all_reduce at train.py:52 (#214)"],
    ),
    "it has not joined": (
        evidence(rank(0, [JOIN, frame("train.py", 6)]), rank(1, [LOAD])),
        Timeout(seconds=4.0, key="0/1"),
        ["rank 1 did not reach init_process_group at train.py:6 within 4 s: it was sleeping at train.py:8 in load"],
    ),
    "a key that nobody has set": (
        evidence(rank(0, [frame("train.py", 6, source="store.wait(['never'])")]), rank(1, [LOAD])),
        Timeout(seconds=4.0, key="never"),
        [
            "no rank set the key 'never' that rank 0 waited for at train.py:6 within 4 s",
            "rank 1: it was sleeping at train.py:8 in load",
        ],
    ),
    "a message": (
        evidence(
            rank(0, collective("recv", 6), [CallEvidence(group="0", seq=0, op="recv", peer=1)], size=2),
            rank(1, [LOAD]),
        ),
        FIVE,
        [
            "rank 1 did not send what rank 0 waited for in recv from rank 1 at train.py:6 within 5 s: it was sleeping "
            "at train.py:8 in load"
        ],
    ),
    "named by the message alone": (
        evidence(rank(0, [frame("train.py", 6)]), rank(1, [LOAD])),
        Timeout(seconds=3.0, ranks=(1,)),
        ["rank 1 did not arrive; rank 0 waited at train.py:6 for 3 s: it was sleeping at train.py:8 in load"],
    ),
    "everybody has come": (evidence(waiting(0, size=2), waiting(1, size=2)), FIVE, []),
    "only named by a watchdog": (
        evidence(rank(0, (), [call("all_reduce", 5)], size=2, proc=process()), behind(1, [LOAD], seq=4, size=2)),
        Timeout(seconds=600.0, op="all_reduce", seq=5, group="0"),
        ["rank 1 did not reach all_reduce #5 within 10 min: it was sleeping at train.py:8 in load"],
    ),
}


@pytest.mark.parametrize(("seen", "timeout", "expected"), CASES.values(), ids=CASES.keys())
def test_who_did_not_come(seen: Evidence, timeout: Timeout, expected: list[str]) -> None:
    lines = blame(seen, 0, timeout)
    assert bool(lines) == bool(expected)
    for line, start in zip(lines, expected, strict=False):
        assert line.startswith(start)
