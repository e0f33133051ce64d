"""Where spares wait, and which ranks they replace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.cluster import Device, Slot
from phalanx.launcher.workers.regroup import spares

SLOTS = [Slot(Device("mig", 0, f"MIG-{n}", f"MIG-{n}", "a slice")) for n in range(4)]


def test_a_spare_waits_on_a_device_that_no_rank_uses() -> None:
    assert spares.slot(SLOTS, SLOTS[:3], []) == SLOTS[3]


def test_where_all_are_used_each_spare_has_another() -> None:
    found: list[Slot] = []
    for _ in SLOTS:
        found.append(spares.slot(SLOTS, SLOTS, found))
    assert sorted(found, key=SLOTS.index) == SLOTS


def test_the_spare_on_the_device_of_the_dead_comes_first() -> None:
    assert spares.pick(SLOTS[1], {"free": SLOTS[3], "same": SLOTS[1]}, [SLOTS[0], SLOTS[2]]) == "same"
    assert spares.pick(SLOTS[1], {"free": SLOTS[3]}, [SLOTS[0], SLOTS[2]]) == "free"


def test_a_spare_on_the_device_of_a_living_rank_does_not_fit() -> None:
    assert spares.pick(SLOTS[1], {"other": SLOTS[0]}, [SLOTS[0], SLOTS[2]]) is None
    assert spares.pick(SLOTS[1], {}, []) is None


def test_without_devices_any_spare_fits() -> None:
    assert spares.pick(Slot(), {"a": Slot()}, [Slot(), Slot()]) == "a"


@given(st.lists(st.sampled_from(range(4)), max_size=6), st.sampled_from(range(4)), st.sets(st.sampled_from(range(4))))
def test_who_is_picked_shares_its_device_with_no_rank(waiting: list[int], dead: int, living: set[int]) -> None:
    ranks = [SLOTS[one] for one in living - {dead}]
    ready = {str(place): SLOTS[one] for place, one in enumerate(waiting)}
    picked = spares.pick(SLOTS[dead], ready, ranks)
    assert (picked is None) == all(one in ranks for one in ready.values())
    assert picked is None or ready[picked] not in ranks
