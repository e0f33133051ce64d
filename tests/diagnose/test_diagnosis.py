"""No verdict for slow ranks; several culprits; many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace as replace_dataclass

import pytest
from msgspec.structs import replace

from phalanx.diagnose.diagnosis import diagnose, remarks
from phalanx.diagnose.evidence import Rank, ThreadStack
from phalanx.diagnose.rules import blame
from phalanx.diagnose.rules.collectives import deadlock
from phalanx.diagnose.waits import survey
from tests.diagnose.made_evidence import (
    GETS,
    HERE,
    ITEM,
    LIB,
    STD,
    backward,
    behind,
    beside,
    call,
    collective,
    evidence,
    frame,
    loading,
    process,
    rank,
    waiting,
    workers,
)

COMPILER = [frame(LIB + "torch/_dynamo/convert_frame.py", 62, "compile_inner"), frame("train.py", 40, "step")]
HEALTHY = {
    "everything progresses": evidence(waiting(0, since=0.1), behind(1, loading(ITEM), since=0.1), waited=0.1),
    "a slow step among slow steps": evidence(
        waiting(0, since=8.0, usual=6.0), behind(1, [HERE], since=8.0, usual=6.0), waited=8.0
    ),
    "all wait, and not for long": evidence(*(waiting(number, since=0.4) for number in range(4)), waited=0.4),
    "one computes": beside(behind(1, [HERE], proc=process("R"), busy=True)),
    "evaluation on rank 0": beside(behind(0, [frame("eval.py", 12, "evaluate")], proc=process("R"), busy=True)),
    "one compiles": beside(behind(1, COMPILER, proc=process("R"), phase="compile")),
    "one waits for processes that compile for it": beside(
        behind(1, [frame(STD + "concurrent/futures/_base.py", 451, "result"), *COMPILER])
    ),
    "all wait for processes that compile for them, for long": evidence(
        *(
            rank(number, COMPILER, proc=process(children=("7 S python", "8 R cc1plus")), since=900.0)
            for number in (0, 1)
        ),
        waited=900.0,
    ),
    "a very long checkpoint": beside(
        behind(
            0, [frame(LIB + "torch/serialization.py", 1003, "save"), HERE], proc=process("D", written=2e8), since=900.0
        ),
        waited=900.0,
    ),
    "one imports": beside(behind(1, [frame("<frozen importlib._bootstrap>", 241, "_load"), HERE], proc=process("R"))),
    "one writes a checkpoint": beside(
        behind(0, [frame(LIB + "torch/serialization.py", 1003, "save"), HERE], proc=process("D", written=2e8))
    ),
    "a debugger is open": beside(behind(1, [frame(STD + "pdb.py", 300, "interaction"), HERE], debugged=True)),
    "a debugger, and all wait": evidence(*(waiting(number, debugged=number == 0) for number in range(4))),
    "ranks that compute alone": evidence(*(rank(number, [HERE], proc=process("R"), busy=True) for number in range(2))),
    "alone, in one long call": evidence(rank(0, [HERE], proc=process("R"))),
    "inference by all, for long": evidence(
        *(rank(number, [HERE], proc=process("R"), busy=True, since=900.0) for number in range(2)), waited=900.0
    ),
    "a parameter server while others train": evidence(
        *(waiting(number, since=0.1, step=90) for number in range(2)), rank(2, [GETS, HERE], since=900.0), waited=0.1
    ),
    "its DataLoader workers compute": beside(
        behind(1, workers(), proc=process(children=("77 S pt_data_worker", "78 R pt_data_worker")))
    ),
    "a data set is read": beside(behind(0, [HERE], proc=process("D", wchan="folio_wait_bit_common", read=2e8))),
    "all ended": evidence(*(rank(number, [], ended=0) for number in range(2))),
    "an all_gather that may be uneven": evidence(
        *(
            rank(
                number,
                collective("all_gather"),
                [call("all_gather", 3, 4 + number, outputs=((4,), (5,), (6,)))],
                since=0.5,
            )
            for number in range(3)
        ),
        waited=0.5,
    ),
    "nobody": evidence(),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_no_verdict(case: str) -> None:
    assert diagnose(HEALTHY[case]) == []


@pytest.mark.parametrize(
    ("case", "remark"),
    [
        (
            "one compiles",
            "rank 1 compiles at train.py:40 in step: slow, and not stuck; the other 3 wait for it in",
        ),
        ("one writes a checkpoint", "rank 0 writes or reads a checkpoint at train.py:33 in flush: slow, and not stuck"),
        ("one computes", "rank 1 computes at train.py:33"),
        ("a debugger is open", "a debugger is open in rank 1"),
    ],
)
def test_remark(case: str, remark: str) -> None:
    assert remarks(HEALTHY[case])[0].startswith(remark)


def test_two_culprits_are_both_named() -> None:
    seen = beside(behind(1, [HERE], proc=process("T")), behind(2, loading(ITEM), proc=process(wchan="futex_do_wait")))
    assert [(verdict.kind, verdict.ranks) for verdict in diagnose(seen)] == [("stopped", (1,)), ("data", (2,))]


def test_mismatch_comes_before_those_who_died_of_it() -> None:
    dead = rank(1, [], [call("all_reduce", 3, 10)], ended=-6)
    others = [rank(number, collective("all_reduce"), [call("all_reduce", 3, 12)]) for number in (0, 2, 3)]
    verdicts = diagnose(evidence(dead, *others))
    assert [verdict.kind for verdict in verdicts] == ["shapes differ", "exited"]
    assert "was killed by SIGABRT" in verdicts[1].text


def test_thread_that_holds_the_lock_is_named() -> None:
    seen = behind(2, collective("all_reduce"), proc=process("R"), silent=38.0)
    other = ThreadStack(name="logger", frames=(frame("log.py", 5, "write"),), holds_gil=True)
    seen = beside(Rank(**{**_fields(seen), "threads": (*seen.threads, other)}))
    assert "spins holding the GIL at log.py:5 in write in thread logger" in diagnose(seen)[0].text


def test_main_thread_that_waits_for_the_lock_does_not_hold_it() -> None:
    bare = behind(2, [frame("train.py", 33)], proc=process(wchan="futex_wait_queue"), silent=38.0)
    one, other = (ThreadStack(name=f"thread {n}", frames=(frame("poll.py", n, "poll"),)) for n in (1, 2))
    known = beside(Rank(**{**_fields(bare), "threads": (*bare.threads, replace(one, holds_gil=True))}))
    assert "rank 2 holds the GIL at poll.py:1 in poll in thread 1; the other 3 wait" in diagnose(known)[0].text
    unknown = diagnose(beside(Rank(**{**_fields(bare), "threads": (*bare.threads, one, other)})))[0]
    assert "a thread of rank 2 holds the GIL, and its main thread waits for it at train.py:33" in unknown.text
    assert unknown.details == ("thread 1 at poll.py:1 in poll", "thread 2 at poll.py:2 in poll")


def test_bucket_is_numbered_where_that_can_be_seen() -> None:
    before = [call("broadcast", 212, 3, done=True), call("all_reduce", 213, 100, done=True, site=tuple(backward()))]
    waits = [rank(number, backward(), [*before, call("all_reduce", 214, 1_625_000)]) for number in (0, 1, 3)]
    text = diagnose(evidence(*waits, behind(2, loading(ITEM), proc=process(wchan="futex_do_wait"))))[0].text
    assert "the other 3 wait for it in all_reduce #214 (DDP bucket 1, 6.5 MB) at train.py:60" in text


def test_many_ranks() -> None:
    size = 256
    seen = beside(behind(170, loading(ITEM), proc=process(wchan="futex_do_wait"), size=size), size=size)
    verdict = diagnose(seen)[0]
    assert verdict.ranks == (170,)
    assert "the other 255 wait for it" in verdict.text


def test_worker_of_a_loader_without_a_fetcher_frame_is_data_by_its_phase() -> None:
    seen = beside(behind(1, [frame("reader.py", 9, "read")], phase="data", proc=process("D")))
    assert (
        "rank 1 is in data loading, reader.py:9 in read (waiting for a disk or another device)"
        in diagnose(seen)[0].text
    )


def _fields(rank: Rank) -> dict[str, object]:
    return {name: getattr(rank, name) for name in rank.__struct_fields__}


class CountedSet(frozenset[int]):
    """A set that counts how often it is read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        CountedSet.reads += 1
        return super().__iter__()

    def __and__(self, other: AbstractSet[object]) -> frozenset[int]:
        CountedSet.reads += 1
        return super().__and__(other)

    def isdisjoint(self, other: Iterable[object]) -> bool:
        CountedSet.reads += 1
        return super().isdisjoint(other)


def test_ranks_that_many_wait_for_are_not_read_for_each_of_those() -> None:
    """Half of all ranks are one collective ahead and wait for the other half, which waits for rank 0."""
    graph = survey(beside(behind(0, loading(ITEM))))
    behind_, ahead = CountedSet(range(500)), range(500, 1000)
    awaits = {**dict.fromkeys(range(1, 500), frozenset({0})), **dict.fromkeys(ahead, behind_)}
    many = replace_dataclass(graph, awaits=awaits)
    assert not list(deadlock.verdicts(many))
    assert blame.roots(many) == {0}
    assert many.waiting_for([0]) == list(range(1, 1000))
    assert CountedSet.reads < 20
