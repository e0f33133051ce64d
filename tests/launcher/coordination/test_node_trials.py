"""Nodes that join a healthy run: how long they are on trial, and when they are dismissed."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control import messages
from phalanx.control.leader.members import JoinedMember, Members
from phalanx.control.leader.roster import Roster
from phalanx.launcher.coordination.coordinator import AgentProxy
from phalanx.launcher.coordination.leader import node_trials
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults
from phalanx.launcher.coordination.leader.member_messages import MemberMessages
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_commands import CurrentAttempt
from phalanx.launcher.coordination.leader.node_trials import NodeTrials
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.workers.regroup.readiness import Readiness
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import RestartPolicy
from tests.control.parties import arrival

CONNECTED = Readiness(connected=True, all_connected=True)
FINISHED = Readiness(connected=True, finished=True, all_connected=True)
FAILURE = WorkerFailure(rank=2, reason="rank 2 failed: ValueError: x", place="", time=0.0, uptime=1.0, step=None)
BEFORE_ITS_FIRST_STEP = "exited with code 0 before its first step in the group: an early return or sys.exit()"


class Run:
    """Node 0 leads, node 1 was there from the start, and `newcomers` (2, ...) have joined. Each has one rank."""

    def __init__(self, *newcomers: int, least: int = 1, elastic: bool = True) -> None:
        self.notes: list[str] = []
        self.removed: list[tuple[int, str, bool]] = []
        self.stopped: list[int] = []
        self.repeats = False  # the next failure would end the run
        self.attempt = CurrentAttempt(number=0, running=True)
        self.preemption = SimpleNamespace(begun=False)
        self.roster = Roster(8, least=least)
        self.members = Members(self.roster)
        self.roster.admit(arrival(0))
        self.states = MemberStates(self.roster, 0)
        self._join(1)
        self.states.start_attempt([1])
        for member in (0, 1):
            self.states.set_readiness(member, CONNECTED)
        for member in newcomers:
            self._join(member)
            self.states.admit(member, None)
        self.states.start_spares(newcomers)
        for member in newcomers:
            self.states.set_readiness(member, CONNECTED)
        self.states.regroup()
        agent, proxy = SimpleNamespace(note=lambda text, **_: self.notes.append(text)), AgentProxy()
        proxy.attach(agent)  # type: ignore[arg-type]
        recoveries = Recoveries(RestartPolicy(3), SimpleNamespace(event=lambda _: None))  # type: ignore[arg-type]
        recoveries.generation = 1
        self.results = AttemptResults(proxy, self.members, Any, recoveries)  # type: ignore[arg-type]
        group: Any = SimpleNamespace(preemption=self.preemption, would_stop=lambda _: self.repeats)
        commands: Any = SimpleNamespace(attempt=self.attempt, stop_member=lambda who, _: self.stopped.append(who))
        self.trials = NodeTrials(
            proxy,
            self.members,
            group,
            member_states=self.states,
            commands=commands,
            recoveries=recoveries,
            results=self.results,
            remove=self._remove if elastic else None,
        )

    def _join(self, member: int) -> None:
        info = arrival(member)
        assert self.roster.admit(info) == member
        self.members.add(JoinedMember(member, info, "10.0.0.9", "10.0.0.1", asyncio.BaseTransport()))

    def _remove(self, member: int, text: str, *, note: bool) -> None:
        self.removed.append((member, text, note))
        self.roster.remove(member)
        self.states.remove(member)

    @property
    def dismissed(self) -> list[int]:
        assert self.stopped == [member for member, _, _ in self.removed]
        return self.stopped

    def sent(self, member: int) -> list[messages.FromLeader]:
        """Return the messages that wait to be sent to a member."""
        return [messages.from_leader.decode(content) for content in self.members.connected[member].outbox._unsent]


# -- failures


def test_a_node_that_fails_on_trial_is_dismissed_and_its_host_waits() -> None:
    run = Run(2)
    assert run.trials.wait(2) == 0
    assert run.trials.greeting(2) == ""
    assert run.trials.worker_failed(2, FAILURE)
    assert run.removed == [(2, "node 2 (host2) was dismissed", True)]
    assert run.dismissed == [2]
    assert run.states.leaving == {2}
    assert run.trials.is_dismissed(2)
    assert run.trials.wait(2) > 9
    assert run.trials.wait(1) == 0
    assert "this host was dismissed before: rank 2 failed: ValueError: x; it gets ranks in" in run.trials.greeting(2)
    assert run.trials.forget(2)
    assert not run.trials.forget(2)


def test_a_node_whose_workers_do_not_start_has_cost_the_others_nothing() -> None:
    run = Run()
    run._join(2)
    run.states.admit(2, None)
    assert run.trials.worker_failed(2, FAILURE)
    assert run.removed == [(2, "node 2 (host2) was dismissed", False)]
    assert run.trials.wait(2) == 0


def test_a_failure_of_a_node_that_has_taken_part_is_the_runs_unless_it_repeats() -> None:
    run = Run(2)
    run.trials.first_step(2, 0)  # of a group before
    assert run.states.on_trial == {2}
    run.trials.first_step(2, 1)
    assert run.states.on_trial == set()
    assert not run.trials.worker_failed(2, FAILURE)
    assert not run.trials.worker_failed(1, FAILURE)
    run.repeats = True
    assert not run.trials.worker_failed(1, FAILURE)
    assert run.dismissed == []
    assert run.trials.worker_failed(2, FAILURE)
    assert run.dismissed == [2]


def begin_preemption(run: Run) -> None:
    run.preemption.begun = True


def stop(run: Run) -> None:
    run.attempt.stopping = True


@pytest.mark.parametrize("ends", [begin_preemption, stop])
def test_no_node_is_dismissed_from_a_run_that_ends(ends: Any) -> None:
    run = Run(2)
    ends(run)
    assert not run.trials.worker_failed(2, FAILURE)
    assert not run.trials.rank_left(2)
    assert not run.trials.dismiss_ranks([2], "it stalls")
    assert run.dismissed == []


def test_no_node_is_dismissed_from_a_run_that_is_not_elastic() -> None:
    run = Run(2, elastic=False)
    assert not run.trials.worker_failed(2, FAILURE)
    assert not run.trials.rank_left(2)
    assert not run.trials.dismiss_ranks([2], "it stalls")
    assert run.dismissed == []


# -- exit code 0


def test_a_rank_that_leaves_before_its_first_step_dismisses_its_node() -> None:
    run = Run(2)
    assert not run.trials.rank_left(1)
    assert run.trials.rank_left(2)
    assert run.dismissed == [2]
    assert f"a rank of node 2 (host2) {BEFORE_ITS_FIRST_STEP}" in run.trials.greeting(2)


def test_a_rank_that_leaves_when_the_training_is_over_is_no_failure() -> None:
    run = Run(2)
    run.states.set_readiness(1, FINISHED)
    assert not run.trials.rank_left(2)


def test_several_nodes_that_end_before_their_first_step_are_all_dismissed() -> None:
    """Each is no evidence that the training is over for the other."""
    run = Run(2, 3)
    for member in (2, 3):
        run.states.set_readiness(member, FINISHED)
    assert run.trials.rank_left(2)
    assert run.trials.rank_left(3)
    assert run.dismissed == [2, 3]


def finish(run: Run, *members: int, meanwhile: Any = lambda: None) -> None:
    """Let the training of these nodes end, and wait until the trial is over."""

    async def scene() -> None:
        for member in members:
            run.states.set_readiness(member, FINISHED)
            run.trials.finished(member)
        meanwhile()
        await asyncio.sleep(0)  # timers that are due run before this returns a second time
        await asyncio.sleep(0)

    asyncio.run(scene())


@pytest.fixture
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_trials, "_TRIAL_END", 0)


@pytest.mark.usefixtures("_no_wait")
def test_a_node_that_ends_before_its_first_step_is_dismissed_if_the_others_train() -> None:
    run = Run(2, 3)
    finish(run, 0, 1)  # were there from the start
    assert run.dismissed == []
    for member in (0, 1):
        run.states.set_readiness(member, CONNECTED)
    finish(run, 2, 3)
    assert run.dismissed == [2, 3]
    assert "the training of node 3 (host3) ended before its first step in the group" in run.trials.greeting(3)
    assert run.sent(2) == []  # its workers have not ended


@pytest.mark.usefixtures("_no_wait")
def test_a_node_that_has_reported_its_end_is_told_why_it_was_dismissed() -> None:
    run = Run(2)
    run.results.add(2, messages.AttemptEnded(attempt=0))
    finish(run, 2)
    assert run.notes[-1].startswith("node 2 (host2) was dismissed: the training of node 2 (host2) ended before its")
    [end] = run.sent(2)
    assert isinstance(end, messages.EndMessage)
    assert end.code == 1
    assert end.text.endswith("\n  this node was dismissed, and the others continue without it")


@pytest.mark.usefixtures("_no_wait")
def test_a_node_that_ends_with_the_others_or_after_its_first_step_is_not_dismissed() -> None:
    run = Run(2)
    finish(run, 2, meanwhile=lambda: run.states.set_readiness(0, FINISHED))
    assert run.dismissed == []
    run.states.set_readiness(0, CONNECTED)
    finish(run, 2, meanwhile=lambda: stop(run))
    assert run.dismissed == []
    run.attempt.stopping = False
    finish(run, 2, meanwhile=lambda: run.trials.first_step(2, 1))
    assert run.dismissed == []


@pytest.mark.usefixtures("_no_wait")
def test_another_node_with_the_same_number_is_not_dismissed() -> None:
    run = Run(2)

    def replaced() -> None:
        run.members.add(JoinedMember(2, arrival(2), "10.0.0.9", "10.0.0.1", asyncio.BaseTransport()))

    finish(run, 2, meanwhile=replaced)
    assert run.dismissed == []


# -- stalls


def test_the_node_of_a_stalled_rank_is_dismissed_if_enough_others_remain() -> None:
    run = Run(2)
    assert not run.trials.dismiss_ranks([9], "nobody has this rank")
    assert not run.trials.dismiss_ranks([0], "this node leads")
    assert run.trials.dismiss_ranks([2], "it stalls")
    assert run.dismissed == [2]
    run = Run(2, least=3)
    assert not run.trials.dismiss_ranks([2], "the others could not continue")


# -- the end of a dismissed node


def failed(**changes: Any) -> messages.AttemptEnded:
    first = messages.FailureReport(rank=2, code=7, time=time.time(), block="rank 2 failed: ValueError: x", **changes)
    return messages.AttemptEnded(attempt=0, failed=1, first=first)


@pytest.mark.parametrize(
    ("report", "text", "code"),
    [
        (failed(), "rank 2 failed: ValueError: x", 7),
        (failed(stopped=True), "it stalls", 1),  # by its dismissal
        (messages.AttemptEnded(attempt=0), "it stalls", 1),
    ],
)
def test_a_dismissed_node_ends_with_the_reason(report: messages.AttemptEnded, text: str, code: int) -> None:
    run = Run(2)
    assert not run.trials.dismissed_ended(2, report)
    run.trials.dismiss_ranks([2], "it stalls")
    assert run.trials.dismissed_ended(2, report)
    assert run.notes == [f"node 2 (host2) was dismissed: {text}"]
    assert run.sent(2) == [
        messages.EndMessage(code=code, text=f"{text}\n  this node was dismissed, and the others continue without it")
    ]


def test_a_dismissed_node_ends_although_the_others_have_restarted_meanwhile() -> None:
    run = Run(2)
    run.trials.dismiss_ranks([2], "it stalls")
    run.attempt.number = 1
    receiver = MemberMessages(
        Any,
        Any,
        run.members,
        member_states=run.states,
        commands=SimpleNamespace(attempt=run.attempt),  # type: ignore[arg-type]
        results=run.results,
        group=Any,
        changes=SimpleNamespace(trials=run.trials),  # type: ignore[arg-type]
        output=Any,
    )
    receiver.message_received(2, messages.AttemptEnded(attempt=0))
    assert [type(message) for message in run.sent(2)] == [messages.EndMessage]
    receiver.message_received(1, messages.AttemptEnded(attempt=0))  # of an attempt that is over
    assert run.results.report(1) is None
