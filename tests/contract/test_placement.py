"""The placement of a rank as workers and other nodes receive it."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import pytest

from phalanx.contract.encoding import encode
from phalanx.contract.messages.worker_messages import Assignment, from_agent
from phalanx.contract.ranks.placement import MAX_RANKS, PartialPlacement
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": -1}, "rank is -1, expected a number from 0"),
        ({"world_size": MAX_RANKS + 1}, "world_size is 1048577"),
        ({"rank": "0"}, "Expected `int`, got `str`"),
        ({"rank": None}, "Expected `int`, got `null`"),
    ],
)
def test_impossible_placements_are_rejected(wrong: dict[str, object], words: str) -> None:
    values = asdict(placement(0, 1))
    assert from_agent.decode(_assignment(values)).placement == placement(0, 1)  # type: ignore[union-attr]
    with pytest.raises(msgspec.ValidationError, match=words):
        from_agent.decode(_assignment({**values, **wrong}))
    del values["rank"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `rank`"):
        from_agent.decode(_assignment(values))


def _assignment(placement: dict[str, object]) -> bytes:
    message = {"type": "assignment", "generation": 1, "topology": "1", "address": "host", "port": 1}
    return json.dumps({**message, "placement": placement}).encode()


def test_a_scheduler_gives_no_more_than_is_allowed() -> None:
    with pytest.raises(ValueError, match="node_rank is -2"):
        PartialPlacement(rank=0, world_size=1, node_rank=-2)
