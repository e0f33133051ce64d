"""What follows the end of an attempt, from the reports of all nodes."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from phalanx.contract.exit_codes import PREEMPTED
from phalanx.control import messages
from phalanx.control.leader.members import Members
from phalanx.control.leader.roster import Roster
from phalanx.control.messages import AttemptEnded, FailedRanks, FailureReport
from phalanx.launcher.coordination.coordinator import AgentProxy, AttemptReport, RunResult
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults, Restart
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.runs.root_cause import CleanExit, ProcessFailure
from phalanx.recover.decision import RestartPolicy

NOW = time.time()
SUCCESS = AttemptReport(0)
MESSAGE = {"message": "RuntimeError: Connection closed by peer", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
PEER_LOST = json.dumps({"message": MESSAGE, "time": NOW + 1})


class Folder:
    def event(self, event: object) -> None:
        pass


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, *, repeats: bool = False) -> None:
        self.notes.append(text)


def results() -> tuple[AttemptResults, Notes]:
    agent, notes, folder = AgentProxy(), Notes(), Folder()
    attached: Any = notes
    agent.attach(attached)
    recoveries = Recoveries(RestartPolicy(3), folder)  # type: ignore[arg-type]
    return AttemptResults(agent, Members(Roster(2)), folder, recoveries), notes  # type: ignore[arg-type]


def own(rank: int = 0, *, at: float = NOW, code: int = 3) -> AttemptReport:
    failure = ProcessFailure(rank=rank, code=code, time=at, stopped=False, device="", error="", stderr=[], memory="")
    return AttemptReport(0, [failure], f"rank {rank} failed")


def theirs(rank: int = 1, *, at: float = NOW, code: int = 4) -> AttemptEnded:
    first = FailureReport(rank=rank, code=code, time=at, block=f"rank {rank} failed")
    return AttemptEnded(attempt=0, failed=1, kinds=(FailedRanks(text=f"exit code {code}", ranks=(rank,)),), first=first)


def evaluate(found: AttemptResults, report: AttemptReport, **changes: Any) -> RunResult | Restart:
    return found.evaluate(report, **{"restarts": False, "preempted": None, "absent": (), **changes})


def test_success_everywhere_is_success() -> None:
    found, notes = results()
    found.add(1, AttemptEnded(attempt=0, left="2 processes are left"))
    assert evaluate(found, SUCCESS) == RunResult(0)
    assert notes.notes == ["node 1: 2 processes are left"]


def test_a_member_that_is_gone_without_a_report_is_no_success() -> None:
    found, _ = results()
    assert evaluate(found, SUCCESS, absent={1}) == RunResult(1)
    found.add(1, AttemptEnded(attempt=0))
    assert evaluate(found, SUCCESS, absent={1}) == RunResult(0)


@pytest.mark.parametrize("own_first", [True, False])
def test_the_first_failure_of_all_nodes_decides(own_first: bool) -> None:
    found, _ = results()
    found.add(1, theirs(at=NOW + (10 if own_first else -10)))
    result = evaluate(found, own())
    assert isinstance(result, RunResult)
    assert result.code == (3 if own_first else 4)
    assert ("on node 1" in result.text) is not own_first


def test_what_became_of_the_ranks_of_other_nodes_is_added_to_the_first_cause() -> None:
    found, _ = results()
    lost = FailureReport(rank=2, code=1, time=NOW + 1, block="rank 2 failed")
    kinds = (
        FailedRanks(place="exit code 3", text="exit code 3", ranks=(4,)),
        FailedRanks(text="exit code 9", ranks=(5,)),
        FailedRanks(text="KeyError: 1", late=True, ranks=(6,)),
        FailedRanks(lost_peer=True, ranks=(2, 3)),
    )
    found.add(1, AttemptEnded(attempt=0, failed=5, kinds=kinds, first=lost))
    report = replace(own(), block="rank 0 failed\n  all of its output: /x")
    gone = replace(report.deaths[0], rank=1, error=PEER_LOST, code=1)
    result = evaluate(found, replace(report, deaths=[*report.deaths, gone]))
    assert isinstance(result, RunResult)
    assert result.text.splitlines() == [
        "rank 0 failed",
        "  afterwards: rank 4 failed in the same way",
        "  afterwards: rank 5 failed: exit code 9",
        "  afterwards: ranks 1-3 lost the peer",
        "  all of its output: /x",
    ]


def test_a_rank_that_exited_early_on_another_node_is_to_blame() -> None:
    found, _ = results()
    found.add(1, AttemptEnded(attempt=0, exited=(messages.CleanExitReport(rank=1, time=NOW, in_training=True),)))
    lost = replace(own().deaths[0], error=PEER_LOST, code=1, time=NOW + 1)
    result = evaluate(found, AttemptReport(0, [lost], "rank 0 failed: …\n  all of its output: /x"))
    assert result == RunResult(
        1,
        "rank 1 exited in the middle of the training, with exit code 0, while rank 0 still needed it\n"
        "  uneven data, an early return, or sys.exit() on some ranks only?\n"
        "  rank 0 lost the peer: RuntimeError: Connection closed by peer\n"
        "  all of its output: /x",
    )


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_of_the_leader_that_exited_early_is_to_blame(early: bool) -> None:
    found, _ = results()
    first = FailureReport(rank=1, code=1, time=NOW + 1, error=PEER_LOST, block="rank 1 failed: …")
    found.add(1, AttemptEnded(attempt=0, failed=1, first=first))
    result = evaluate(found, AttemptReport(0, exited=[CleanExit(0, NOW if early else NOW + 60)]))
    assert isinstance(result, RunResult)
    words = "rank 0 exited, with exit code 0, while rank 1 still needed it" if early else "rank 1 failed: …"
    assert result.text.splitlines()[0] == words


def test_a_restart_prints_the_failure() -> None:
    found, _ = results()
    next_ = evaluate(found, own(), restarts=True)
    assert isinstance(next_, Restart)
    assert next_.text.startswith("rank 0 failed")
    assert isinstance(evaluate(found, own(), restarts=True, absent={1}), RunResult)  # a node is missing


def test_a_signal_ends_the_run_before_anything_else() -> None:
    found, _ = results()
    found.signal = signal.SIGINT
    assert evaluate(found, own(), restarts=True) == RunResult(128 + signal.SIGINT)
    assert found.ended() == RunResult(128 + signal.SIGINT)


def test_a_preempted_run_can_be_run_again() -> None:
    found, _ = results()
    assert evaluate(found, own(), preempted="halted") == RunResult(PREEMPTED, "halted")


@pytest.mark.parametrize(("seconds", "code"), [(-100, 3), (100, 1)])
def test_a_lost_node_is_the_cause_unless_a_rank_failed_before(seconds: float, code: int) -> None:
    found, _ = results()
    found.fail(RunResult(1, "node 1 is lost"))
    found.fail(RunResult(2, "later"))
    result = evaluate(found, own(at=time.time() + seconds))
    assert isinstance(result, RunResult)
    assert result.code == code


def test_changed_nodes_restart_all_ranks_once() -> None:
    found, _ = results()
    found.nodes_changed = True
    assert not found.is_last(failed=False, restarts=False)
    assert isinstance(evaluate(found, own()), Restart)
    assert isinstance(evaluate(found, own()), RunResult)


@pytest.mark.parametrize("restarts", [True, False])
def test_trouble_of_a_node_that_no_worker_caused(restarts: bool) -> None:
    found, notes = results()
    next_ = evaluate(found, AttemptReport(0, trouble="the fork server was killed"), restarts=restarts)
    assert isinstance(next_, Restart) is restarts
    assert notes.notes == ["the fork server was killed"] * restarts
    if isinstance(next_, RunResult):
        assert next_ == RunResult(128 + signal.SIGKILL, "the fork server was killed")


def test_the_last_attempt_is_known_from_all_reports() -> None:
    found, _ = results()
    assert found.is_last(failed=False, restarts=True)
    assert not found.is_last(failed=True, restarts=True)
    found.add(1, theirs())
    assert not found.is_last(failed=False, restarts=True)
    assert found.is_last(failed=False, restarts=False)
    found.start_attempt()
    assert found.is_last(failed=False, restarts=True)
