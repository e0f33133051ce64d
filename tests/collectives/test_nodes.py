"""Groups across machines: who is where, every collective in both kinds of memory, a machine that is lost."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from phalanx.collectives import neighbours
from phalanx.collectives.neighbours import Neighbours
from phalanx.collectives.trouble import Late


def test_machines_are_in_the_order_of_their_lowest_rank() -> None:
    assert neighbours.sort(["b", "a", "b", "c", "a"], 4) == Neighbours(((0, 2), (1, 4), (3,)), 1)


def test_ranks_of_this_process_are_on_one_machine() -> None:
    store = dist.HashStore()
    found: list[Neighbours] = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(neighbours.find(store, rank, 3, 60)))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Neighbours(((0, 1, 2),), 0)] * 3


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("machine of 1", "elsewhere")
    with pytest.raises(Late, match=r"a group of 4 ranks waited 0\.1 s for ranks 2 and 3 to come"):
        neighbours.find(store, 0, 4, 0.1)
