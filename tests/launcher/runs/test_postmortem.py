"""What is read from the folder of a finished run: the rank that ended it, not one that was replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from phalanx.contract import events
from phalanx.diagnose.verdict import Verdict
from phalanx.launcher.runs import postmortem, summary
from phalanx.launcher.runs.run_folder import RunRecord


def record(folder: Path, *happened: events.Event, node: int = 0) -> RunRecord:
    (folder / "events.jsonl").write_bytes(b"".join(map(events.encode, happened)))
    return RunRecord("run", 1, 1, [], "/", str(folder), 2, started=1.0, ended=90.0, code=1, node=node)


def started(attempt: int, time: float) -> list[events.Event]:
    workers = [
        events.WorkerStarted(time=time, rank=rank, pid=attempt * 10 + rank, attempt=attempt) for rank in range(2)
    ]
    return [events.AttemptStarted(time=time, attempt=attempt), *workers]


def exited(rank: int, code: int, attempt: int, time: float, pid: int | None = None) -> events.WorkerExited:
    return events.WorkerExited(
        time=time, rank=rank, pid=attempt * 10 + rank if pid is None else pid, code=code, attempt=attempt
    )


def stopping(time: float) -> events.Stopping:
    return events.Stopping(time=time, reason="rank 1 failed", signal="SIGTERM")


def test_the_cause_in_the_second_attempt(tmp_path: Path) -> None:
    """Workers that were stopped in the first attempt are irrelevant for the second."""
    first = [*started(0, 1.0), exited(1, 1, 0, 2.0), stopping(2.0), exited(0, -15, 0, 3.0)]
    second = [*started(1, 4.0), exited(1, -9, 1, 5.0), stopping(5.0), exited(0, -15, 1, 6.0)]
    remains = postmortem.read(record(tmp_path, *first, *second))
    assert postmortem.first(remains) == "rank 1 failed: SIGKILL (Killed)"
    assert "rank 1 failed: SIGKILL" in postmortem.report(remains)


def test_the_cause_after_a_replacement(tmp_path: Path) -> None:
    again = events.WorkerStarted(time=3.0, rank=1, pid=20)
    remains = postmortem.read(record(tmp_path, *started(0, 1.0), exited(1, -9, 0, 2.0), again, exited(0, 3, 0, 9.0)))
    assert postmortem.first(remains) == "rank 0 failed: exit code 3"


def test_a_stopped_run_has_no_cause(tmp_path: Path) -> None:
    """Then the ranks end with a KeyboardInterrupt: nothing has failed."""
    stop = events.Stopping(time=2.0, reason="SIGINT", signal="SIGINT")
    folder = tmp_path / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("Traceback (most recent call last):\nKeyboardInterrupt\n")
    found = record(tmp_path, *started(0, 1.0), stop, exited(1, -2, 0, 3.0), exited(0, -2, 0, 3.0))
    stopped = postmortem.read(replace(found, code=130))
    assert postmortem.first(stopped) == ""
    assert "failed" not in postmortem.report(stopped)
    assert "rank 1 failed: KeyboardInterrupt" in postmortem.report(postmortem.read(found))


def test_the_cause_on_another_node(tmp_path: Path) -> None:
    failed = events.WorkerFailed(time=3.0, rank=7, summary="rank 7 failed: ValueError: x", code=1)
    folder = tmp_path / "attempt_0" / "0"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n")
    remains = postmortem.read(record(tmp_path, *started(0, 1.0), exited(0, 1, 0, 2.0), failed))
    lines = postmortem.report(remains)
    assert "rank 7 failed: ValueError: x\n  on another node" in lines
    assert "Connection closed" not in lines
    there = tmp_path / "node_1" / "attempt_0" / "7"  # they share a disk
    there.mkdir(parents=True)
    (there / "stderr.log").write_text(
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\nValueError: x\n'
    )
    lines = postmortem.report(remains)
    assert "a.py:3 in f" in lines
    assert f"all of its output: {there}" in lines


def test_a_stall_that_was_reported_again_counts_once(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        folder = tmp_path / f"stall_{number}"
        folder.mkdir()
        verdict = Verdict(kind="sleep", ranks=(1,), text=f"rank 1 has slept for {number} min")
        (folder / "verdict.json").write_bytes(msgspec.json.encode([verdict]))
    remains = postmortem.read(record(tmp_path, *started(0, 1.0), node=1))
    assert [verdict.text for verdict in remains.verdicts] == ["rank 1 has slept for 10 min"]
    assert "this is the part of node 1" in postmortem.report(remains)


def test_faults_that_ended_the_run_were_not_survived(tmp_path: Path) -> None:
    def fault(rank: int, time: float, recovery: str) -> events.FaultEvent:
        return events.FaultEvent(time=time, rank=rank, reason=f"rank {rank} failed: KeyError", recovery=recovery)

    joined = events.FaultEvent(time=1.5, rank=0, reason="node 1 joined", recovery="regroup", kind="node-joined")
    recovered = events.Recovered(time=3.0, generation=1, seconds=1.0, step=5)
    last = [fault(0, 4.0, "regroup"), fault(1, 4.0, "stop")]
    found = record(tmp_path, *started(0, 1.0), joined, fault(1, 2.0, "regroup"), recovered, *last)
    text = postmortem.report(postmortem.read(found))
    (clock,) = (line.split()[0] for line in text.splitlines() if line.endswith("rank 1 failed: KeyError"))
    assert f"it survived 1 fault:\n  {clock} rank 1 failed: KeyError\n" in text
    assert "rank 0" not in text
    assert summary.of(found).faults == 1
