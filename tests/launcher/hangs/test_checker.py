"""Calls of ranks, compared in shared memory. Ranks are threads here, which makes no difference."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import pytest

from phalanx.forkserver.board import ledger
from phalanx.forkserver.board.ledger import CallLedger
from phalanx.forkserver.collective_check import exchange, fingerprint, mismatch
from phalanx.forkserver.collective_check.exchange import SharedMemoryExchange
from phalanx.forkserver.collective_check.fingerprint import CollectiveCall
from phalanx.forkserver.collective_check.mismatch import Side

RANKS = 3
MARK = 77


class Node:
    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, ledger.size(RANKS + 1))
        self.slots = {rank: RANKS - rank for rank in range(RANKS)}  # not in rank order
        for rank, slot in self.slots.items():
            ledger.clear(self.memory, slot)
            ledger.set_rank(self.memory, slot, rank)
        self.ledgers = {rank: CallLedger(self.memory, slot) for rank, slot in self.slots.items()}

    def way(self, rank: int, mark: int = MARK) -> SharedMemoryExchange:
        peers = {other: slot for other, slot in self.slots.items() if other != rank}
        return SharedMemoryExchange(self.ledgers[rank], mark, rank, self.slots[rank], peers)

    def call(self, way: SharedMemoryExchange, number: int, what: int, *, waits: bool = True) -> list[Side]:
        return way.compare(number, what, f"call{what}(float32 [10])\0train.py\0{what}\0f(x)".encode(), waits=waits)


@pytest.fixture
def node() -> Node:
    return Node()


def at_once(*calls: Callable[[], list[Side]]) -> list[list[Side]]:
    found: dict[int, list[Side]] = {}
    threads = [
        threading.Thread(target=lambda at=at, call=call: found.update({at: call()})) for at, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(len(calls))]


def test_ranks_that_agree_continue_however_many_groups_and_calls_there_are(node: Node) -> None:
    def live(rank: int) -> list[Side]:
        groups = [node.way(rank, mark) for mark in range(1, ledger.LANES + 1)]
        for number in range(1, ledger.DEPTH * 2):
            for group in groups[: 2 if number > 1 else None]:
                if found := node.call(group, number, number):
                    return found
        return []

    assert at_once(*(lambda rank=rank: live(rank) for rank in range(RANKS))) == [[], [], []]  # type: ignore[misc]


def test_all_ranks_see_the_same_two_sides(node: Node) -> None:
    ranks = [node.way(rank) for rank in range(RANKS)]
    what = {0: 5, 1: 6, 2: 5}
    found = at_once(*(lambda rank=rank: node.call(ranks[rank], 1, what[rank]) for rank in range(RANKS)))  # type: ignore[misc]
    expected = [
        Side((1,), "call6(float32 [10])", "train.py", 6, "f(x)"),
        Side((0, 2), "call5(float32 [10])", "train.py", 5, "f(x)"),
    ]
    assert found == [expected] * RANKS
    assert mismatch.reporter(found[0]) == 1
    assert mismatch.message(found[0], 1, "all ranks").splitlines() == [
        "rank 1 called call6 where ranks 0, 2 called call5 (collective 1 of all ranks)",
        "  rank 1: call6(float32 [10]) at train.py:6",
        "      f(x)",
        "  ranks 0, 2: call5(float32 [10]) at train.py:5",
        "      f(x)",
    ]


def test_async_calls_do_not_wait_and_the_last_rank_sees_the_mismatch(node: Node) -> None:
    ranks = [node.way(rank) for rank in range(RANKS)]
    for number in range(1, 5):
        assert node.call(ranks[0], number, number, waits=False) == []
        assert node.call(ranks[1], number, number, waits=False) == []
    assert node.call(ranks[2], 1, 1, waits=False) == []
    assert [side.ranks for side in node.call(ranks[2], 2, 9, waits=False)] == [(2,), (0, 1)]


def test_a_rank_that_is_far_ahead_is_not_compared(node: Node) -> None:
    ranks = [node.way(rank) for rank in range(RANKS)]
    for number in range(1, ledger.DEPTH + 2):
        node.call(ranks[0], number, 5, waits=False)
        node.call(ranks[1], number, 5, waits=False)
    assert node.call(ranks[2], 1, 6) == []  # both have arrived, and have overwritten earlier records
    assert node.call(ranks[2], 2, 6) != []


def test_who_does_not_come_is_waited_for_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WAIT", 0.3)
    way, other = node.way(0), node.way(1)
    assert node.call(other, 1, 5, waits=False) == []
    began = time.monotonic()
    assert node.call(way, 1, 5) == []
    assert time.monotonic() - began > 0.25
    monkeypatch.setattr(exchange, "WAIT", 3600.0)
    node.call(other, 2, 5, waits=False)
    assert node.call(way, 2, 5) == []  # rank 2 did not arrive before: it is not waited for
    late = node.way(2)
    assert [side.ranks for side in node.call(late, 1, 6, waits=False)] == [(2,), (0, 1)]


def test_no_rank_waits_for_a_dead_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WAIT", 3600.0)
    way = node.way(0)
    for rank in (1, 2):
        ledger.set_rank(node.memory, node.slots[rank], None)
    assert node.call(way, 1, 5) == []
    assert node.ledgers[0].slots_by_rank() == {0: node.slots[0]}


def test_records_of_a_group_before_are_not_of_this_one(node: Node) -> None:
    before = [node.way(rank) for rank in range(RANKS)]
    for way in before:
        node.call(way, 1, 5, waits=False)
    after = [node.way(rank, MARK + 1) for rank in range(RANKS)]
    assert [node.call(way, 1, 6, waits=False) for way in after] == [[], [], []]


def test_a_lane_belongs_to_one_group_until_the_group_is_gone(node: Node) -> None:
    own = node.ledgers[0]
    lanes = [own.open(mark) for mark in range(1, ledger.LANES + 1)]
    assert sorted(lanes) == list(range(ledger.LANES))
    with pytest.raises(LookupError):
        own.open(100)
    own.close(lanes[3])
    own.close(lanes[9])
    assert [own.open(100), own.open(101)] == [lanes[3], lanes[9]]
    assert own.lane(node.slots[0], 4) is None
    assert own.lane(node.slots[0], 100) == lanes[3]


ALL_REDUCE = CollectiveCall("all_reduce", "torch.float32", ((2, 5),), 0)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (ALL_REDUCE._replace(shapes=((10,),)), True),  # same number of elements, different layout
        (ALL_REDUCE._replace(shapes=((11,),)), False),
        (ALL_REDUCE._replace(shapes=((5,), (5,))), False),
        (ALL_REDUCE._replace(dtype="torch.int64"), False),
        (ALL_REDUCE._replace(reduction=4), False),
        (ALL_REDUCE._replace(op="reduce", root=0), False),
    ],
    ids=["layout", "size", "number", "dtype", "reduction", "op"],
)
def test_what_ranks_must_agree_on(other: CollectiveCall, same: bool) -> None:
    assert (fingerprint.fingerprint(ALL_REDUCE) == fingerprint.fingerprint(other)) is same


def test_an_all_to_all_may_have_any_size() -> None:
    one, other = (CollectiveCall("all_to_all_single", "torch.float32", ((size,),)) for size in (1, 2))
    assert fingerprint.fingerprint(one) == fingerprint.fingerprint(other)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ALL_REDUCE, "all_reduce(float32 [2, 5], SUM)"),
        (CollectiveCall("barrier"), "barrier()"),
        (CollectiveCall("all_gather", "torch.int64", ((2,),) * 3), "all_gather(int64 3 x [2])"),
        (CollectiveCall("broadcast", "torch.int64", ((),), root=2), "broadcast(int64 [], root 2)"),
    ],
    ids=["all_reduce", "barrier", "all_gather", "broadcast"],
)
def test_how_a_call_is_reported(call: CollectiveCall, text: str) -> None:
    assert fingerprint.describe(call) == text
