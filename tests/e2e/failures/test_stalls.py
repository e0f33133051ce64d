"""Real processes that hang: each kind is reported correctly, with its rank and line; slow ones are not reported."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.contract import events
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import WhyQuery, WhyReply
from phalanx.launcher.runs.run_folder import RunRecord
from tests.e2e.jobs import codes, together
from tests.e2e.places import script
from tests.kit.cli import PYTHON, phalanx, start
from tests.kit.lab import Lab
from tests.kit.proc import SLOWEST

SCRIPT = script("hang.py")
LIMIT = "6"  # seconds: on a loaded machine a rank that starts may need four until it has joined
LIMITS = {
    "loop": "2",  # computing ranks have ten times as long before an action
    "healthy": "2",  # its parts take twice as long
    # A rank is killed and the others train again: a loaded machine may stop one for seconds between two steps, in which
    # it sleeps, and it would be killed as well.
    "once": str(2 * SLOWEST),
}
pytestmark = pytest.mark.warmed

# What hangs: the kind of the verdict, and the ranks to blame. Its line has a mark with its name.
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "data": ("data", (2,)),
    "loader": ("data", (2,)),
    "uneven": ("uneven data", (2,)),
    "evaluate": ("evaluation", (0,)),
    "sleeps": ("sleep", (2,)),
    "skipped": ("skipped collective", (0,)),
    "extra": ("skipped collective", (0,)),
    "operation": ("wrong operation", (2,)),
    "shape": ("shapes differ", (2,)),
    "order": ("deadlock", (0, 2)),
    "send": ("send without a receive", (0, 1)),
    "recv": ("receive without a send", (0, 1)),
    "both": ("both receive", (0, 1)),
    "stopped": ("stopped", (2,)),
    "backtrack": ("gil", (2,)),
    "loop": ("loop", (2,)),
    "asks": ("input", (0,)),
    "child": ("subprocess", (2,)),
    "waits": ("lock", (2,)),
    "key": ("store", (2,)),
    "fifo": ("input", (2,)),
    "absent": ("join", (2,)),
}
# With backend shm, where the others use gloo. It reports ranks that differ at once: test_checker.py.
SHM = ("data", "sleeps", "order", "send", "both", "stopped", "backtrack", "asks", "waits", "fifo", "absent", "once")
SMOKE = {"uneven", "skipped", "shape", "stopped"}  # one that waits, two with different calls, one that cannot run
GROUPS = [pytest.mark.xdist_group(f"explain-{number}") for number in range(2)]  # each has a warm fork server


def words(kind: str, folder: Path, *options: str, ranks: int = 3) -> tuple[str, ...]:
    limit = LIMITS.get(kind, LIMIT)
    backend = "shm" if kind in SHM else "gloo"
    return ("run", "-g", str(ranks), "--cpu", "--stall-timeout", limit, *options, SCRIPT, kind, str(folder), backend)


def folder_of(text: str) -> Path:
    return Path(re.findall(r"output in (\S+)", text)[0])


def recorded(folder: Path) -> list[Any]:
    return [events.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def marked(kind: str) -> int:
    lines = Path(SCRIPT).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# here: {kind}"))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[GROUPS[at % 2], *([pytest.mark.smoke] if kind in SMOKE else [])])
        for at, kind in enumerate(KINDS)
    ],
)
def test_what_hangs_is_named(tmp_path: Path, kind: str) -> None:
    done = phalanx(*words(kind, tmp_path, "--on-hang", "stop"))
    folder = folder_of(done.err)
    stall = folder / "stall_1"
    assert (stall / "verdict.json").exists(), done.err
    first = json.loads((stall / "verdict.json").read_text())[0]
    evidence = (stall / "evidence.json").read_text()
    expected, ranks = KINDS[kind]
    assert (first["kind"], tuple(first["ranks"])) == (expected, ranks), f"{done.err}\n{evidence}"
    if kind != "absent":
        assert f"hang.py:{marked(kind)}" in first["text"], f"{done.err}\n{evidence}"
        assert first["place"]["file"] == SCRIPT
        assert first["place"]["line"] == marked(kind) or kind == "skipped"  # the rank that skipped it is elsewhere
    # It is reported at once, and as the reason of the end.
    assert done.code == 1
    assert done.err.count(first["text"]) == (3 if kind == "loop" else 2)  # again, after it has lasted long enough
    verdicts = [event for event in recorded(folder) if isinstance(event, events.VerdictEvent)]
    assert (verdicts[0].kind, verdicts[0].ranks, verdicts[0].text) == (expected, ranks, first["text"])
    assert any(isinstance(event, events.Stalled) and event.folder == str(stall) for event in recorded(folder))
    assert sorted(path.name for path in stall.iterdir()) == ["evidence.json", "stacks.txt", "verdict.json"]
    if kind not in ("stopped", "absent"):  # stacks of a stopped process need py-spy
        assert f'hang.py", line {marked(kind)} in ' in (stall / "stacks.txt").read_text()


# gloo adds ten integers and ten floats, and continues; a later stall is unrelated.
PASSED = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for number in range(1, 41):
    odd = dist.get_rank() == 2 and number == 31
    dist.all_reduce(torch.ones(10, dtype=torch.int32 if odd else torch.float32))
if dist.get_rank() == 1:
    time.sleep(1000)
dist.barrier()
"""


@GROUPS[0]
def test_a_difference_that_all_ranks_have_passed_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "passed.py").write_text(PASSED)
    options = ("run", "-g", "3", "--cpu", "--stall-timeout", LIMIT, "--on-hang", "stop")
    done = phalanx(*options, str(tmp_path / "passed.py"))
    verdicts = json.loads((folder_of(done.err) / "stall_1" / "verdict.json").read_text())
    assert [(each["kind"], each["ranks"]) for each in verdicts] == [("dtypes differ", [2]), ("sleep", [1])], done.err
    first = verdicts[0]
    sentence = "dtypes differ in all_reduce #31 at passed.py:6: rank 2 has int32, the other 2 have float32"
    assert first["text"] == sentence
    assert "rank 2: all_reduce #31 [10] int32 at passed.py:6" in first["details"]
    assert "all ranks continued, with wrong results since collective 31" in first["details"]


@GROUPS[0]
def test_slow_ranks_are_not_blamed(tmp_path: Path) -> None:
    done = phalanx(*words("healthy", tmp_path, ranks=2))
    assert done.code == 0, done.err
    assert not list(folder_of(done.err).glob("stall_*")), done.err


@GROUPS[1]
def test_a_stall_that_ends_by_itself_is_reported_too(tmp_path: Path) -> None:
    with start(*words("goes_on", tmp_path)) as job:
        job.wait_for("rank 2 is sleeping")
        started = [event for event in recorded(folder_of(job.err)) if isinstance(event, events.WorkerStarted)]
        os.kill(next(event.pid for event in started if event.rank == 2), signal.SIGUSR1)
        assert job.wait() == 0, job.err
    assert "the run resumed after" in job.err
    assert "the run was stalled when it ended" not in job.err
    kinds = [type(event).__name__ for event in recorded(folder_of(job.err))]
    assert kinds.index("Stalled") < kinds.index("VerdictEvent") < kinds.index("Resumed")


@GROUPS[0]
def test_phalanx_why_during_the_stall_and_after_the_end(tmp_path: Path) -> None:
    with start(*words("sleeps", tmp_path)) as job:
        job.wait_for("rank 2 is sleeping", timeout=60)
        record = RunRecord(**json.loads((folder_of(job.err) / "run.json").read_text()))
        answer = control_socket.request(record, WhyQuery(), WhyReply, timeout=30)
        assert isinstance(answer, WhyReply)
        assert [(each.kind, each.ranks) for each in answer.verdicts] == [("sleep", (2,))]
        assert [rank.rank for rank in answer.evidence.ranks] == [0, 1, 2]
        assert answer.verdicts[0].text in answer.report
        job.process.send_signal(signal.SIGINT)
        assert job.wait(60) == 128 + signal.SIGINT
        assert "the run was stalled when it ended:\n  rank 2 is sleeping" in job.err


@pytest.mark.smoke
@GROUPS[1]
def test_the_blamed_rank_is_killed_and_the_run_recovers(tmp_path: Path) -> None:
    done = phalanx(*words("once", tmp_path, "--on-hang", "kill", "--max-restarts", "1"))
    assert done.code == 0, done.err
    assert "rank 2 stalled: SIGKILL" in done.err
    ended = [event for event in recorded(folder_of(done.err)) if isinstance(event, events.WorkerExited)]
    assert [event.code for event in ended if event.rank == 2] == [-signal.SIGKILL, 0]


# Asks the agent of this machine why, wherever the leader is.
ASKS = """
import sys
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import WhyQuery, WhyReply
from phalanx.launcher.runs import run_folder
(run,) = [run for run in run_folder.all_runs(sys.argv[1]) if run.alive]
answer = control_socket.request(run, WhyQuery(), WhyReply, timeout=60)
print("why", [(rank.rank, rank.node, bool(rank.threads)) for rank in answer.evidence.ranks])
"""


def test_a_link_that_is_down_is_named(lab: Lab, tmp_path: Path) -> None:
    """The nodes exchange their evidence first, whichever one is asked."""
    jobs = together(lab, "--cpu", "--stall-timeout", "4", SCRIPT, "cut", str(tmp_path), ranks=(1, 1))
    jobs[0].wait_for("steps are done")
    home = folder_of(jobs[1].err).parents[2]
    asked = lab[1].run(words=(*PYTHON, "-c", ASKS, str(home)))
    assert asked.out.strip() == "why [(0, 0, True), (1, 1, True)]", asked.err
    lab[1].link(False)
    jobs[0].wait_for(re.compile(r"node node2 \(rank 1\) does not answer: link down"))
    lab[1].link(True)
    jobs[0].wait_for("the run resumed after")
    jobs[0].process.send_signal(signal.SIGTERM)
    codes(jobs)
