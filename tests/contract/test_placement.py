"""The placement of a rank as workers and other nodes receive it."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.contract.encoding import encode
from phalanx.contract.messages.worker_messages import Assignment, from_agent
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.contract.variables import rank_variables
from tests.kit.placements import placement


def test_in_an_assignment() -> None:
    here = placement(5, 6, local_rank=1, local_world_size=2, node_rank=2, node_count=3)
    assignment = Assignment(generation=1, placement=here, topology="2*3", address="host", port=29500)
    assert from_agent.decode(encode(assignment)) == assignment
    assert rank_variables(assignment) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
        "PHALANX_TOPOLOGY": "2*3",
    }


@pytest.mark.parametrize("values", [[0, 1, 0, 1, 0], [-1, 1, 0, 1, 0, 1], [0, (1 << 20) + 1, 0, 1, 0, 1], ["0"] * 6])
def test_what_cannot_be_is_rejected(values: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, RankPlacement)
