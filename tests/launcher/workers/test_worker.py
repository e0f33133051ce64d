"""The states of a worker, in its agent."""

from __future__ import annotations

import pytest

from phalanx.launcher.workers.worker import Worker, WorkerState
from tests.kit.placements import seat

STARTING, RUNNING, CONNECTED, FINISHED, STOPPING, EXITED = WorkerState


def after(*states: WorkerState) -> Worker:
    worker = Worker(seat(), "")
    for state in states:
        worker.enter(state)
    return worker


@pytest.mark.parametrize(
    ("states", "state", "connected", "finished", "stopped"),
    [
        ((), STARTING, False, False, False),
        ((RUNNING, EXITED), EXITED, False, False, False),
        ((RUNNING, CONNECTED, FINISHED, EXITED), EXITED, True, True, False),
        ((RUNNING, CONNECTED, STOPPING, EXITED), EXITED, True, False, True),
        ((STOPPING, RUNNING, CONNECTED), STOPPING, False, False, True),  # later reports change nothing
        ((RUNNING, FINISHED), RUNNING, False, False, False),  # only a worker that can regroup reports it
        ((EXITED, STOPPING), EXITED, False, False, False),  # it had ended by itself
    ],
)
def test_states_follow_each_other(
    states: tuple[WorkerState, ...], state: WorkerState, connected: bool, finished: bool, stopped: bool
) -> None:
    worker = after(*states)
    assert worker.state is state
    assert (worker.connected, worker.finished, worker.stopped) == (connected, finished, stopped)
    assert not after(EXITED).enter(RUNNING)
