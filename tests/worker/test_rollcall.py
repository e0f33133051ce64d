"""Which ranks are present, which are missing, and which share a machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.errors import JoinError
from phalanx.forkserver.signed_store import SignedStore
from phalanx.worker.rendezvous import roll_call
from phalanx.worker.rendezvous.identity import Identity
from phalanx.worker.rendezvous.roll_call import Participant


def person(
    rank: int,
    size: int = 4,
    machine: str = "a",
    *,
    node: int | None = None,
    local_rank: int | None = None,
    **more: Any,
) -> Participant:
    placement = PartialPlacement(rank=rank, world_size=size, local_rank=local_rank, node_rank=node)
    return Participant(placement, machine, machine, 100 + rank, **more)


def attend(
    people: Sequence[Participant], timeout: float = 20, say: Any = lambda _: None, store: Any = None
) -> list[tuple[Participant, ...] | JoinError]:
    """Run the roll call of these participants concurrently, with a real store."""
    from torch.distributed import HashStore

    store = store or SignedStore(HashStore(), "")
    found: list[Any] = [None] * len(people)

    def come(place: int) -> None:
        try:
            found[place] = roll_call.call(store, people[place], timeout, place="node1 port 4000", say=say)
        except JoinError as error:
            found[place] = error

    threads = [threading.Thread(target=come, args=(place,)) for place in range(len(people))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks() -> None:
    people = [person(rank) for rank in (2, 0, 3, 1)]
    expected = tuple(sorted(people, key=lambda one: one.rank))
    assert attend(people) == [expected] * 4


def test_the_missing_are_named_by_all() -> None:
    found = attend([person(0, 8), person(5, 8, "b", address="10.0.0.2")], timeout=1)
    for error in found:
        assert isinstance(error, JoinError)
        assert error.what == "6 of 8 ranks did not come in 1 s: ranks 1-4, 6-7"
        assert error.details == (
            "here: rank 0 on a, pid 100",
            "here: rank 5 on b (10.0.0.2), pid 105",
            "they meet at node1 port 4000",
        )


def test_rank_0_is_missing_and_the_store_is_not() -> None:
    messages: list[str] = []
    (error,) = attend([person(1, 2)], timeout=1.5, say=messages.append)
    assert isinstance(error, JoinError)
    assert error.what == "1 of 2 ranks did not come in 1.5 s: rank 0"
    assert messages == ["rank 1 waits for rank 0 at node1 port 4000"]


def test_the_store_stays_until_all_ranks_have_read_why() -> None:
    from torch.distributed import HashStore

    store = SignedStore(HashStore(), "")
    leaving: list[float] = []

    def come(rank: int) -> None:
        with pytest.raises(JoinError, match="1 of 3 ranks did not come in 1 s: rank 2"):
            roll_call.call(store, person(rank, 3), 1, place="a")
        leaving.append(store.add("read", 0))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leaving == [2, 2]


def test_a_call_that_not_all_ranks_make_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    monkeypatch.setattr(roll_call, "NOTICE", 0.05)

    store = SignedStore(HashStore(), "")
    messages: list[str] = []
    with pytest.raises(JoinError) as caught:
        roll_call.together(store, person(2), 2, name="group.leader_group", say=messages.append)
    assert caught.value.what == "group.leader_group was asked for by rank 2, and in 2 s not by ranks 0-1, 3"
    assert messages == ["rank 2 waits for ranks 0-1, 3 in group.leader_group, which all ranks must call"]
    for rank in (0, 1):
        store.set(f"group.leader_group/{rank}", "")
    roll_call.together(store, person(3), 20, name="group.leader_group", say=messages.append)


def test_a_rank_that_is_there_already() -> None:
    from torch.distributed import HashStore

    store = SignedStore(HashStore(), "")
    attend([person(0, 1)], store=store)
    (error,) = attend([Participant(PartialPlacement(rank=0, world_size=1), "b", "b", 7)], store=store)
    assert isinstance(error, JoinError)
    assert error.what == "rank 0 is already there: rank 0 on a, pid 100"
    assert "pid 7 on b" in str(error)
    assert "MASTER_PORT" in error.fix


def test_different_world_sizes_are_reported() -> None:
    found = attend([person(0, 2), person(1, 3)])
    for error in found:
        assert isinstance(error, JoinError)
        assert "have different world sizes" in error.what
        assert "WORLD_SIZE=3" in str(error)


@pytest.mark.parametrize(
    ("people", "spelled", "nodes"),
    [
        ([person(0), person(1), person(2, machine="b")], "", ((0, 1), (2,))),
        ([person(0, machine="b"), person(1), person(2, machine="b")], "", ((0, 2), (1,))),
        # Node numbers from the launcher: two nodes on one machine; the first rank on the second node.
        ([person(0, node=0), person(1, node=1)], "", ((0,), (1,))),
        ([person(0, node=1), person(1, node=0)], "", ((1,), (0,))),
        # Only one rank knows its node.
        ([person(0, node=0), person(1)], "", ((0, 1),)),
        ([person(0), person(1)], "1*2", ((0,), (1,))),
    ],
)
def test_topology(people: list[Participant], spelled: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    assert roll_call.topology(people, 0, spelled).nodes == nodes


def test_local_ranks() -> None:
    for messages, mine in (((None, None), 1), ((0, 1), 1), ((1, 0), 0), ((0, 0), 1)):
        people = [person(rank, 2, local_rank=one) for rank, one in enumerate(messages)]
        assert roll_call.placement(people, roll_call.topology(people, 1)).local_rank == mine


def test_what_a_rank_says_about_itself() -> None:
    given = PartialPlacement(rank=3, world_size=4, local_rank=1, node_rank=1)
    me = roll_call.here(Identity("torchrun", given), address="10.0.0.1", devices="0")
    assert (me.placement, me.address, me.devices) == (given, "10.0.0.1", "0")
    other = PartialPlacement(rank=2, world_size=4)
    assert me.machine == roll_call.here(Identity("torchrun", other)).machine
