"""Table: a rank that keeps the others waiting."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import Gpu, Rank, ThreadStack
from tests.diagnose.made_evidence import (
    C10D,
    GETS,
    HERE,
    ITEM,
    LIB,
    STD,
    WORK,
    Case,
    backward,
    behind,
    beside,
    call,
    collective,
    evidence,
    frame,
    loading,
    named_right,
    process,
    rank,
    waiting,
    workers,
)

RUN = [frame(STD + "subprocess.py", 2004, "_try_wait"), frame(STD + "subprocess.py", 550, "run"), HERE]
QUEUE = [frame(STD + "multiprocessing/queues.py", 103, "get"), HERE]
FORK = ThreadStack(name="process 4711 python", frames=(frame("work.py", 8, "produce"), HERE))
KEEPS = behind(1, QUEUE, size=2, proc=process(children=("4711 S python",)))
FORKED = (waiting(0, size=2), replace(KEEPS, threads=(*KEEPS.threads, FORK)))

KEPT: dict[str, Case] = {
    "data: a lock": (
        beside(behind(2, loading(ITEM), proc=process(wchan="futex_do_wait"))),
        "data",
        (2,),
        [
            "rank 2 is in data loading, dataset.py:41 in __getitem__ (waiting for a lock); "
            "the other 3 wait for it in all_reduce #214 (6.5 MB) at train.py:52"
        ],
    ),
    "data: workers": (
        beside(behind(1, workers(), proc=process(children=("77 S pt_data_worker", "78 S pt_data_worker")))),
        "data",
        (1,),
        ["waiting for its DataLoader workers", "train.py:50"],
    ),
    "data: a worker is dead": (
        beside(behind(1, workers(), proc=process(children=("77 Z pt_data_worker", "78 S pt_data_worker")))),
        "data",
        (1,),
        ["a DataLoader worker that is dead: process 77"],
    ),
    "data: a worker in D": (
        beside(behind(1, workers(), proc=process(children=("77 D pt_data_worker",)))),
        "data",
        (1,),
        ["waiting for a disk or NFS: process 77"],
    ),
    "data: workers of whom nothing is known": (beside(behind(1, workers())), "data", (1,), ["its DataLoader workers)"]),
    "data: NFS": (
        beside(behind(3, loading(ITEM), proc=process("D", wchan="rpc_wait_bit_killable"))),
        "data",
        (3,),
        ["dataset.py:41", "network file system"],
    ),
    "data: while a collective is under way": (
        beside(rank(2, loading(ITEM), [call("all_reduce", 213, 1_625_000)], proc=process(wchan="futex_do_wait"))),
        "data",
        (2,),
        ["waiting for a lock"],
    ),
    "lock": (beside(behind(2, [GETS, HERE])), "lock", (2,), ["rank 2 is waiting for a lock at train.py:33 in flush"]),
    "queue": (beside(behind(2, [GETS, frame(STD + "queue.py", 171, "get"), HERE])), "lock", (2,), ["for a queue"]),
    "lock by the text of the line": (
        beside(behind(0, [frame("train.py", 7, source="lock.acquire()")])),
        "lock",
        (0,),
        ["waiting for a lock at train.py:7"],
    ),
    "thread": (
        beside(
            behind(
                2,
                [
                    frame(STD + "threading.py", 1139, "_wait_for_tstate_lock"),
                    frame(STD + "threading.py", 1, "join"),
                    HERE,
                ],
            )
        ),
        "lock",
        (2,),
        ["for a thread to end"],
    ),
    "input": (
        beside(behind(1, [frame("train.py", 9, source="if input() == 'y':")], proc=process(wchan="anon_pipe_read"))),
        "input",
        (1,),
        ["rank 1 is waiting for input at train.py:9"],
    ),
    "sleep": (
        beside(behind(1, [HERE], proc=process(wchan="hrtimer_nanosleep"))),
        "sleep",
        (1,),
        ["is sleeping at train.py:33"],
    ),
    "subprocess": (
        beside(
            behind(1, [frame(STD + "subprocess.py", 2004, "_try_wait"), frame(STD + "subprocess.py", 550, "run"), HERE])
        ),
        "subprocess",
        (1,),
        ["a process that it has started"],
    ),
    "subprocess, by its command and its state": (
        beside(behind(1, RUN, proc=process(children=("4711 S sleep 1000", "4712 S gzip x")))),
        "subprocess",
        (1,),
        ["a process that it has started (process 4711 `sleep 1000`, sleeping) at train.py:33"],
    ),
    "a fork, by its line": (
        evidence(*FORKED),
        "lock",
        (1,),
        ["waiting for a queue (process 4711 `python`, sleeping at work.py:8 in produce) at train.py:33"],
    ),
    "file": (
        beside(behind(1, [HERE], proc=process("D", wchan="folio_wait_bit_common"))),
        "file",
        (1,),
        ["for a disk at train.py:33"],
    ),
    "requests": (
        beside(
            behind(0, [frame(STD + "socket.py", 706, "readinto"), frame(LIB + "requests/api.py", 59, "request"), HERE])
        ),
        "socket",
        (0,),
        ["waiting for the network at train.py:33"],
    ),
    "store": (
        beside(
            behind(1, [frame("train.py", 62, source='store.get("key")')], proc=process(wchan="poll_schedule_timeout"))
        ),
        "store",
        (1,),
        ["waiting for a key of the store at train.py:62, which no rank has set"],
    ),
    "endless loop": (
        beside(behind(1, [HERE], proc=process("R"))),
        "loop",
        (1,),
        ["rank 1 loops", "train.py:33 in flush"],
    ),
    "endless loop over many lines": (
        beside(behind(1, [HERE], proc=process("R"), busy=True, since=400.0), waited=400.0),
        "loop",
        (1,),
        ["rank 1 loops"],
    ),
    "checkpoint that does not move": (
        beside(
            behind(0, [frame(LIB + "torch/serialization.py", 1003, "save"), HERE], proc=process("D", wchan="nfs_wait"))
        ),
        "checkpoint",
        (0,),
        ["writing or reading a checkpoint (waiting for a network file system) at train.py:33"],
    ),
    "kernel that does not end": (
        beside(
            behind(
                1,
                [frame(LIB + "torch/cuda/__init__.py", 1040, "synchronize"), HERE],
                proc=process("R"),
                gpu=Gpu(index=1, use=1.0),
            )
        ),
        "gpu",
        (1,),
        ["waits for the GPU (GPU 1, 100% in use)", "train.py:33"],
    ),
    "nothing but a place": (
        beside(behind(1, [HERE])),
        "no progress",
        (1,),
        ["rank 1 has made no progress for 40 s at train.py:33 in flush"],
    ),
    "nothing at all": (
        beside(Rank(rank=1, node=0, note="its page is empty", since=40.0)),
        "unknown",
        (1,),
        ["rank 1 does not respond", "its page is empty"],
    ),
    "has ended well": (
        beside(rank(1, [], [call("all_reduce", 213, 4, done=True)], ended=0, step=99)),
        "uneven data",
        (1,),
        ["rank 1 left the loop earlier", "ended with exit code 0", "all_reduce #214", "uneven data"],
    ),
    "destroys its group": (
        beside(behind(1, [frame(C10D, 2300, "destroy_process_group"), frame("train.py", 99)])),
        "uneven data",
        (1,),
        ["is in destroy_process_group at train.py:99"],
    ),
    "at exit": (
        beside(behind(3, [frame(STD + "threading.py", 1590, "_shutdown")])),
        "uneven data",
        (3,),
        ["is at its end"],
    ),
    "ended, and the others asked for their rank": (
        evidence(
            rank(0, collective("barrier", 88, guard="if rank == 0"), [call("barrier", 5)]),
            *(rank(number, [], [call("all_reduce", 4, 4, done=True)], ended=0) for number in (1, 2, 3)),
        ),
        "skipped collective",
        (0,),
        ["rank 0 called one more collective than the others, barrier #5", "`if rank == 0`", "ranks 1-3 ended with"],
    ),
    "most have left": (
        evidence(
            *(rank(number, [], [call("all_reduce", 213, 4, done=True)], ended=0) for number in (1, 2)),
            waiting(0),
            waiting(3),
        ),
        "uneven data",
        (1, 2),
        ["ranks 1, 2 left the loop", "the other 2 still wait in all_reduce #214"],
    ),
    "two at one place": (
        beside(behind(1, [GETS, HERE]), behind(2, [GETS, HERE])),
        "lock",
        (1, 2),
        ["ranks 1, 2 are waiting for a lock at train.py:33 in flush; the other 2 wait for them in all_reduce #214"],
    ),
    "a message under way": (
        evidence(*(rank(number, [frame("train.py", 48, source="work.wait()")]) for number in range(2))),
        "message",
        (0, 1),
        ["ranks 0, 1 are waiting for an operation under way at train.py:48"],
    ),
    "sleeps alone": (
        evidence(rank(0, [frame("g.py", 5, "get", source="time.sleep(1000)")], step=30)),
        "sleep",
        (0,),
        ["rank 0 is sleeping at g.py:5 in get"],
    ),
    "all at one place": (
        evidence(*(rank(number, [HERE], step=30) for number in range(2))),
        "no progress",
        (0, 1),
        ["ranks 0, 1 have made no progress for 40 s at train.py:33 in flush"],
    ),
    "does not end": (
        evidence(rank(0, [frame(C10D, 2300, "destroy_process_group"), frame("train.py", 99)]), rank(1, [], ended=0)),
        "leaving",
        (0,),
        ["rank 0 is in destroy_process_group at train.py:99, and does not end"],
    ),
    "waits for a group of ours, and spins": (
        evidence(
            *(
                rank(number, [frame(WORK, 50, "wait"), *backward()], [call("all_reduce", 214, 10)], proc=process("R"))
                for number in (0, 2, 3)
            ),
            behind(1, [HERE], proc=process(wchan="hrtimer_nanosleep")),
        ),
        "sleep",
        (1,),
        ["rank 1 is sleeping at train.py:33 in flush; the other 3 wait for it in all_reduce #214 (DDP, 40 B)"],
    ),
    "crashed": (
        beside(behind(1, [], ended=1)),
        "exited",
        (1,),
        ["rank 1 ended with exit code 1; the other 3 wait for it"],
    ),
    "killed": (beside(behind(1, [], ended=-9)), "exited", (1,), ["rank 1 was killed by SIGKILL"]),
}


@pytest.mark.parametrize("case", KEPT)
def test_named_right(case: str) -> None:
    verdict = named_right(KEPT[case])
    assert (
        not verdict.certain or verdict.kind in ("uneven data", "skipped collective", "exited") or "dead" in verdict.text
    )


def test_with_a_short_limit_every_waiting_rank_counts() -> None:
    """The ranks reached the collective at different times, all of them longer ago than the limit."""
    found = evidence(
        waiting(0, size=3, since=2.1),
        waiting(1, size=3, since=1.5),
        behind(2, loading(ITEM), size=3, since=1.2, proc=process(wchan="futex_do_wait")),
        waited=1.1,
        limit=1.0,
    )
    assert "the other 2 wait for it in all_reduce" in diagnose(found)[0].text


@pytest.mark.parametrize("silent", [0.4, 1.5, 3.5, 7.0])
def test_a_waiting_rank_that_does_not_answer_in_time_is_not_blamed_for_another(silent: float) -> None:
    """On a busy host: all that is known is that the rank was in a collective at its last status update."""
    mute = Rank(rank=0, node=0, process=process(), phase="collective", silent=silent, since=9.0, note="no answer")
    sleeps = behind(2, [HERE], size=3, since=9.0)
    found = diagnose(evidence(mute, waiting(1, size=3, since=9.0), sleeps, waited=9.0, limit=8.0))
    assert [verdict.ranks for verdict in found] == [(2,)]


def test_a_waiting_rank_that_stays_silent_is_blamed() -> None:
    mute = Rank(rank=0, node=0, process=process(), phase="collective", silent=9.0, since=9.0, note="no answer")
    found = diagnose(evidence(mute, waiting(1, size=2, since=9.0), waited=9.0, limit=8.0))
    assert [(verdict.kind, verdict.ranks) for verdict in found] == [("gil", (0,))]
