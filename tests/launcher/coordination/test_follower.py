"""What a follower reports to the leader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.contract.messages.worker_messages import FirstStep
from phalanx.control.messages import FirstStepCommitted, Message, RankLeft, Start, StartRanks
from phalanx.launcher.actions import Action, RefuseRegroup, StartAttempt
from phalanx.launcher.coordination.follower.coordinator import FollowerCoordinator
from phalanx.launcher.coordination.follower.orders import FollowerState, LeaderOrders
from tests.kit.placements import placement


def test_a_node_reports_a_first_step_once_though_each_of_its_ranks_does() -> None:
    sent: list[Message] = []
    follower: Any = SimpleNamespace(state=SimpleNamespace(attempt=0), _first_step=(-1, -1), _send=sent.append)
    for message in (FirstStep(0, 1), FirstStep(0, 1), FirstStep(1, 8, 7), FirstStep(1, 8, 6)):
        FollowerCoordinator.first_step(follower, message)
    follower.state.attempt = 1  # a restart: the same generation, other workers
    FollowerCoordinator.first_step(follower, FirstStep(1, 3))
    assert sent == [
        FirstStepCommitted(generation=0, step=1),
        FirstStepCommitted(generation=1, step=8, before=7),
        FirstStepCommitted(generation=1, step=3),
    ]


def test_a_rank_that_left_concerns_the_attempt_that_runs() -> None:
    performed: list[Action] = []
    parts: Any = {
        "context": None,
        "agent": SimpleNamespace(perform=performed.append),
        "state": FollowerState(attempt=2, running=True),
        "assign": None,
        "leader_lost": None,
    }
    orders = LeaderOrders(**parts)
    orders.message_received(RankLeft(attempt=1))
    assert performed == []
    orders.message_received(RankLeft(attempt=2))
    assert performed == [RefuseRegroup()]


@pytest.mark.parametrize(
    ("spare", "joins", "notes"),
    [
        (False, False, []),
        (True, True, ["the run has begun: this node gets its ranks once its workers have started"]),
        (True, False, ["all ranks are assigned: this node is a spare"]),
    ],
)
def test_only_a_node_without_a_place_is_called_a_spare(spare: bool, joins: bool, notes: list[str]) -> None:
    printed: list[str] = []
    plan: Any = SimpleNamespace(seats=(), group=SimpleNamespace(world_size=3))
    parts: Any = {
        "context": SimpleNamespace(console=SimpleNamespace(settle=lambda *_: None)),
        "agent": SimpleNamespace(note=printed.append, waiting=lambda _: None, perform=lambda _: None),
        "state": FollowerState(),
        "assign": lambda _: plan,
        "leader_lost": None,
    }
    place = StartRanks(placements=(placement(2, 3),), topology="3", store_port=4711, spare=spare, joins=joins)

    async def follow() -> object:
        orders = LeaderOrders(**parts)
        orders.message_received(Start(attempt=0, place=place))
        return await orders.next()

    assert asyncio.run(follow()) == StartAttempt(0, plan, None, 0)
    assert printed == notes
