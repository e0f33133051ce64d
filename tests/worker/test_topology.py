"""The placement of a rank, from its environment. tests/e2e/nodes/test_nodes.py tests the groups."""

from __future__ import annotations

import pytest

from phalanx.errors import UsageError
from phalanx.worker.rendezvous import topology


def test_uneven_nodes() -> None:
    here = topology.read({"RANK": "2", "WORLD_SIZE": "3", "PHALANX_TOPOLOGY": "2,1"})
    assert (here.node_rank, here.local_rank, here.local_ranks, here.leaders) == (1, 0, (2,), (0, 2))


def test_dealt_out_in_turn() -> None:
    here = topology.read({"RANK": "3", "WORLD_SIZE": "4", "PHALANX_TOPOLOGY": "0.2/1.3"})
    assert (here.node_rank, here.local_rank, here.local_ranks, here.leaders) == (1, 1, (1, 3), (0, 1))


def test_another_launcher_with_even_nodes() -> None:
    here = topology.read({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"})
    assert (here.node_rank, here.local_rank, here.local_ranks, here.leaders) == (2, 1, (4, 5), (0, 2, 4))


def test_no_launcher() -> None:
    here = topology.read({})
    assert (here.node_rank, here.local_ranks, here.leaders) == (0, (0,), (0,))


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({"RANK": "x"}, "invalid literal"),
        ({"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, "5 ranks cannot be 2 on every node"),
        ({"RANK": "0", "WORLD_SIZE": "2", "PHALANX_TOPOLOGY": "2,1"}, "left over"),
        ({"RANK": "7", "WORLD_SIZE": "3", "PHALANX_TOPOLOGY": "3"}, "RANK=7"),
    ],
)
def test_invalid_variables_are_refused(environ: dict[str, str], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        topology.read(environ)
    assert seen in str(caught.value)
