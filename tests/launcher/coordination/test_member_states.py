"""Which members of a run have ranks, which are spares, and when they get ranks."""

from __future__ import annotations

import pytest

from phalanx.control.leader.roster import Roster
from phalanx.control.messages import AttemptState
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.workers.regroup.readiness import Readiness
from tests.control.parties import arrival

CONNECTED = Readiness(connected=True)
FINISHED = Readiness(connected=True, finished=True)
READY = Readiness(connected=True, all_connected=True)


def member_states(nodes: int, *, expected: int, least: int = 1, spares: int = 0) -> MemberStates:
    """Node 0 leads, all nodes have two slots, and an attempt has started."""
    roster = Roster(expected, least=least, spares=spares)
    for member in range(nodes):
        assert roster.admit(arrival(member, slots=2)) == member
    made = MemberStates(roster, 0)
    made.start_attempt(range(1, nodes))
    return made


def state(**changes: bool) -> AttemptState:
    flags = {"connected": True, "finished": False, "all_connected": False, **changes}
    return AttemptState(attempt=0, generation=3, **flags)


def ranks(made: MemberStates) -> dict[int, tuple[int, ...]]:
    return {member: table.ranks for member, table in made.ranks.items()}


def test_an_attempt_gives_ranks_to_as_many_as_are_expected() -> None:
    made = member_states(3, expected=2, spares=1)
    assert ranks(made) == {0: (0, 1), 1: (2, 3)}
    assert (made.room, made.enough) == (0, True)
    spare = made.start_ranks(2, 4711)
    assert (spare.spare, spare.joins, spare.store_port) == (True, False, 4711)
    assert [(each.rank, each.world_size, each.node_count) for each in spare.placements] == [(4, 4, 2), (5, 4, 2)]


def test_a_node_that_joins_is_on_trial_until_its_first_step() -> None:
    made = member_states(3, expected=3)
    made.remove(2)
    assert not made.cannot_take_part(1, ends_run=True)  # it was there from the start: its failure is the run's
    for member in (0, 1):
        made.set_readiness(member, CONNECTED)
    assert made.admit(2, None)
    assert made.start_spares([1, 2]) == [2]
    assert made.start_ranks(2, 4711).joins  # there is room for it
    assert made.cannot_take_part(2, ends_run=False)  # its workers do not start
    made.set_readiness(2, READY)
    assert made.start_ranks(2, 4711).joins  # it needs no second place
    made.regroup()
    assert made.cannot_take_part(2, ends_run=False)
    assert not made.cannot_take_part(1, ends_run=True)
    made.on_trial.discard(2)  # a step is committed
    assert not made.cannot_take_part(2, ends_run=False)
    assert made.cannot_take_part(2, ends_run=True)
    made.leaving.add(2)
    made.remove(2)
    assert not made.cannot_take_part(2, ends_run=True)  # it is already leaving


def test_of_two_nodes_that_start_for_one_place_only_the_first_is_told_that_it_gets_ranks() -> None:
    made = member_states(4, expected=3, spares=1)
    made.remove(2)
    for member in (0, 1):
        made.set_readiness(member, CONNECTED)
    assert made.admit(2, None)  # the lost node is there again, and a spare waits
    assert made.start_spares([1, 2, 3]) == [2, 3]
    assert [made.start_ranks(member, 4711).joins for member in (2, 3)] == [True, False]
    made.set_readiness(3, READY)  # it is faster, so it gets the place
    assert not made.start_ranks(2, 4711).joins


def test_a_spare_starts_only_once_the_script_can_regroup() -> None:
    made = member_states(3, expected=2, spares=1)
    assert made.start_spares([1, 2]) == []
    made.set_readiness(1, CONNECTED)
    assert made.start_spares([1]) == []  # it is not connected
    assert made.start_spares([1, 2]) == [2]
    assert made.start_spares([1, 2]) == []  # once


def test_a_spare_replaces_a_lost_node() -> None:
    made = member_states(3, expected=2, spares=1)
    made.set_readiness(1, CONNECTED)
    made.start_spares([1, 2])
    assert not made.set_readiness(2, CONNECTED)  # not all of its workers
    assert made.set_readiness(2, READY)
    assert made.next_ready() == []  # there is no room
    lost = made.remove(1)
    assert lost is not None
    assert lost.ranks == (2, 3)
    assert made.next_ready() == [2]
    made.regroup()
    assert ranks(made) == {0: (0, 1), 2: (2, 3)}
    assert made.can_regroup(2)


def test_too_few_nodes_are_not_enough_until_another_is_ready() -> None:
    made = member_states(2, expected=3, least=2)
    made.set_readiness(0, CONNECTED)
    made.remove(1)
    assert not made.enough
    assert made.admit(2, None)
    made.start_spares([2])
    assert not made.enough
    made.set_readiness(2, READY)
    assert made.enough
    assert made.next_ready() == [2]


def test_a_finished_rank_ends_all_regroups() -> None:
    made = member_states(2, expected=2)
    made.set_readiness(0, CONNECTED)
    assert made.readiness.can_regroup
    made.set_readiness(1, FINISHED)
    assert not made.readiness.can_regroup
    assert made.can_regroup(0)
    assert not made.can_regroup(1)


def test_a_spare_whose_workers_end_gets_no_ranks() -> None:
    made = member_states(3, expected=2, spares=1)
    made.set_readiness(0, CONNECTED)
    made.start_spares([1, 2])
    made.set_readiness(2, READY)
    made.spare_ended(2)
    made.remove(1)
    assert made.next_ready() == []


def test_nodes_that_join_a_script_that_cannot_regroup_get_ranks_in_a_restart() -> None:
    roster = Roster(2, least=1)
    roster.admit(arrival(0, slots=2))
    made = MemberStates(roster, 0)
    made.start_attempt([])
    roster.admit(arrival(1, slots=2))
    assert made.admit(1, None)
    assert made.next_idle([1]) == [1]
    assert made.next_idle([]) == []
    made.leaving.add(1)
    made.start_attempt([1])
    assert ranks(made) == {0: (0, 1)}
    made.leaving.clear()
    made.start_attempt([1])
    assert ranks(made) == {0: (0, 1), 1: (2, 3)}


@pytest.mark.parametrize("finished", [False, True])
def test_the_members_of_a_lost_leader(finished: bool) -> None:
    made = MemberStates(Roster(4, least=3), 1)
    made.expect([1, 2, 3], worked=[0, 1, 2], own=CONNECTED)
    made.keep([1, 2])  # 3 has not joined
    assert made.ranks.keys() == {1, 2}
    assert not made.admit(2, state(finished=finished))
    assert made.readiness.can_regroup is not finished
    assert not made.enough
    assert not made.admit(3, state(all_connected=True))  # a spare, after all
    assert made.enough


def test_a_spare_node_that_leads_instead_of_a_lost_leader_is_not_on_trial() -> None:
    """It cannot be dismissed, and nobody would end its trial."""
    made = member_states(4, expected=3, spares=1)
    made.own = 3
    made.expect([1, 2, 3], worked=[0, 1, 2], own=READY)
    made.remove(0)
    assert made.next_ready() == [3]
    made.regroup()
    assert ranks(made) == {1: (0, 1), 2: (2, 3), 3: (4, 5)}
    assert made.on_trial == set()


def test_workers_of_another_attempt_are_not_taken_over() -> None:
    made = member_states(1, expected=2)
    assert made.admit(1, state(finished=True))  # idle: its workers have to stop
    assert made.next_idle([1]) == [1]


def test_all_members_get_the_same_topology_which_is_computed_once_per_change() -> None:
    made = member_states(4, expected=4)
    first = made.start_ranks(1, 4711).topology
    assert first == "2*4"
    assert all(made.start_ranks(member, 4711).topology is first for member in range(4))
    made.remove(2)
    made.regroup()
    assert {made.start_ranks(member, 4711).topology for member in (0, 1, 3)} == {"2*3"}
