"""What a follower reports to the leader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from phalanx.contract.messages.worker_messages import FirstStep
from phalanx.control.messages import FirstStepCommitted, Message
from phalanx.launcher.coordination.follower.coordinator import FollowerCoordinator


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
