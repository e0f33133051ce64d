"""Tables: which nodes may join, under which number, and which ranks each gets."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.contract.ranks import topology
from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.control.leader import roster
from phalanx.control.leader.roster import RankTable, Roster
from phalanx.control.messages import NodeInfo, Refusal
from tests.control.parties import arrival
from tests.kit.placements import placement


def with_leader(expected: int = 3, promised: tuple[int, ...] = (), **changes: Any) -> Roster:
    made = Roster(expected, promised)
    assert made.admit(arrival(0, **changes)) == 0
    return made


def test_the_numbers_that_are_asked_for() -> None:
    made = with_leader(3)
    assert made.missing == [1, 2]
    assert made.admit(arrival(2)) == 2
    assert made.missing == [1]
    assert not made.complete
    assert made.admit(arrival(1)) == 1
    assert made.complete


def test_the_lowest_free_number_is_given() -> None:
    made = with_leader(5)
    assert made.admit(arrival(2)) == 2
    assert [made.admit(arrival(None)) for _ in range(2)] == [1, 3]
    made.remove(1)
    made.remove(7)  # never existed
    assert made.missing == [1, 4]
    assert [made.admit(arrival(None)) for _ in range(2)] == [1, 4]
    assert made.complete


@pytest.mark.parametrize(
    ("leader", "member", "refusal"),
    [
        ({"run": "a"}, {"run": "b"}, ("run", "a", "b")),
        ({"versions": {"torch": "2.9"}}, {"versions": {"torch": "1.13"}}, ("version", "torch 2.9", "torch 1.13")),
        ({"versions": {"phalanx": "1.0"}}, {"versions": {"phalanx": "2.0"}}, ("version", "phalanx 1.0", "phalanx 2.0")),
        ({"terms": {"nodes": "2"}}, {"terms": {"nodes": "4"}}, ("plan", "nodes: 2", "nodes: 4")),
        ({"terms": {"script": "a.py"}}, {"terms": {"script": "b.py"}}, ("plan", "script: a.py", "script: b.py")),
        ({}, {"member": 3}, ("plan", "3 nodes", "node 3")),
        ({"host": "first", "pid": 7}, {"member": 0}, ("taken", "first, pid 7", "node 0")),
        ({}, {"trouble": "no GPU"}, ("trouble", "", "no GPU")),
        # If there are several reasons, the one that makes the others meaningless comes first.
        ({"run": "a"}, {"run": "b", "member": 0, "trouble": "x"}, ("run", "a", "b")),
    ],
)
def test_refusals(leader: dict[str, Any], member: dict[str, Any], refusal: tuple[str, str, str]) -> None:
    made = with_leader(**leader)
    found = made.admit(arrival(**{"member": 1, **member}))
    assert isinstance(found, Refusal)
    assert (found.kind, found.leader, found.member) == refusal
    assert list(made.members) == [0]


@pytest.mark.parametrize(
    ("leader", "member"),
    [
        ({"run": "a"}, {"run": ""}),
        ({"run": ""}, {"run": "b"}),
        ({"versions": {"torch": "2.9"}}, {"versions": {"torch": "2.11"}}),
        ({"versions": {"nccl": "2.27"}}, {"versions": {}}),
        ({"terms": {"script": "a.py"}}, {"terms": {}}),
        ({"terms": {"arguments": "1"}}, {"terms": {"arguments": "2"}}),
    ],
)
def test_differences_that_do_not_matter(leader: dict[str, Any], member: dict[str, Any]) -> None:
    assert with_leader(**leader).admit(arrival(1, **member)) == 1


def test_one_more_than_there_is_room_for() -> None:
    made = with_leader(1)
    found = made.admit(arrival(None))
    assert found == Refusal(kind="taken", leader="all 1 nodes are here", member="one more")


@pytest.mark.parametrize(
    ("member", "slots", "kind"), [(1, 2, None), (1, 3, "devices"), (2, 4, None), (None, 2, None), (None, 4, "devices")]
)
def test_promises(member: int | None, slots: int, kind: str | None) -> None:
    made = with_leader(3, promised=(1, 2, 4))
    found = made.admit(arrival(member, slots=slots))
    assert (found.kind if isinstance(found, Refusal) else None) == kind


def test_a_scheduler_may_start_fewer_workers_than_expected() -> None:
    made = Roster(2, (4, 4))
    claim = PartialPlacement(rank=0, world_size=2, local_rank=0, local_world_size=2)
    assert made.admit(arrival(0, slots=1, claim=claim)) == 0


def test_warnings() -> None:
    made = with_leader(host="one", versions={"torch": "2.9"}, terms={"arguments": "1", "script": "a"})
    odd = arrival(1, host="two", versions={"torch": "2.11"}, terms={"arguments": "2", "script": "b"})
    assert made.warnings(odd) == ["two has torch 2.11, one 2.9", "two was started with other arguments than one"]
    assert made.warnings(arrival(1, versions={"torch": "2.9"}, terms={"arguments": "1"})) == []


def test_ranks_run_through_uneven_nodes() -> None:
    members = {0: arrival(0, slots=2), 2: arrival(2, slots=1), 1: arrival(1, slots=3)}
    assert roster.seat(members) == {
        member: RankTable(
            tuple(
                placement(first + local, 6, local_rank=local, local_world_size=size, node_rank=member, node_count=3)
                for local in range(size)
            )
        )
        for member, first, size in ((0, 0, 2), (1, 2, 3), (2, 5, 1))
    }
    assert roster.world(roster.seat(members)) == topology.encode([[0, 1], [2, 3, 4], [5]])


def tasks(*rows: tuple[int, str, int, int, int | None]) -> dict[int, NodeInfo]:
    """Return the members for rows of (rank, host, local rank, local size, node)."""
    return {
        rank: arrival(
            rank,
            host=host,
            claim=PartialPlacement(
                rank=rank, world_size=len(rows), local_rank=local, local_world_size=size, node_rank=node
            ),
        )
        for rank, host, local, size, node in rows
    }


@pytest.mark.parametrize("node", [True, False])
def test_ranks_as_a_scheduler_dealt_them(node: bool) -> None:
    # Cyclic: consecutive ranks are on different hosts.
    dealt = [(0, "a", 0, 2, 0), (1, "b", 0, 2, 1), (2, "a", 1, 2, 0), (3, "b", 1, 2, 1)]
    members = tasks(*(row if node else (*row[:4], None) for row in dealt))
    assert roster.one_a_rank(members)
    tables = roster.seat(members)
    for rank, (_, _, local, _, node_rank) in enumerate(dealt):
        only = placement(rank, 4, local_rank=local, local_world_size=2, node_rank=node_rank, node_count=2)
        assert tables[rank].placements == (only,)
    assert roster.world(tables) == topology.encode([[0, 2], [1, 3]])


def test_one_task_a_node_takes_all_of_its_slots() -> None:
    members = tasks((0, "a", 0, 1, 0), (1, "b", 0, 1, 1))
    assert not roster.one_a_rank(members)
    assert [table.ranks for table in roster.seat(members).values()] == [(0,), (1,)]


def test_workers_of_a_spare_node_are_numbered_after_the_ranks() -> None:
    tables = roster.seat({0: arrival(0, slots=2), 1: arrival(1, slots=1)})
    assert roster.spare_table(2, tables).placements == (
        placement(3, 3, local_rank=0, local_world_size=2, node_count=2),
        placement(4, 3, local_rank=1, local_world_size=2, node_count=2),
    )
    assert roster.spare_table(1, {0: RankTable()}).ranks == (0,)  # a new leader does not know the ranks of other nodes


def test_thousands_are_numbered_in_no_time() -> None:
    made = with_leader(1 << 14)
    anybody = arrival(None)
    assert [made.admit(anybody) for _ in range((1 << 14) - 1)] == list(range(1, 1 << 14))


# -- nodes that join and leave


def test_with_the_least_it_can_begin_and_one_that_is_gone_leaves_its_place() -> None:
    made = roster.Roster(3, least=2, spares=1)
    assert [made.admit(arrival(None)) for _ in range(2)] == [0, 1]
    assert made.enough
    assert not made.complete
    assert [made.admit(arrival(None)) for _ in range(2)] == [2, 3]  # the last one is a spare
    assert made.complete
    assert isinstance(made.admit(arrival(None)), Refusal)
    made.remove(1)
    assert made.admit(arrival(None)) == 1


@pytest.mark.parametrize(
    ("here", "before", "working"),
    [
        ([0, 1, 2, 3], [], [0, 1, 2]),  # the first ones
        ([0, 2, 3], [0, 1, 2], [0, 2, 3]),  # a spare replaces the lost node
        ([0, 2], [0, 1, 2], [0, 2]),  # fewer
        ([0, 1, 2, 3], [0, 2, 3], [0, 2, 3]),  # a node that comes back does not replace another
        ([0, 1, 2], [0, 2], [0, 1, 2]),  # but it takes a free place
    ],
)
def test_who_works_when_nodes_come_and_go(here: list[int], before: list[int], working: list[int]) -> None:
    members = {id_: arrival(id_) for id_ in here}
    assert list(roster.working(members, before, 3)) == working
