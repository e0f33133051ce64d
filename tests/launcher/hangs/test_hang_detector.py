"""The action on a stall, and what does not count as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.contract import encoding
from phalanx.diagnose.evidence import Evidence, Rank
from phalanx.diagnose.rank_state import LONGER
from phalanx.diagnose.verdict import Verdict
from phalanx.launcher.hangs import detector, hang_action
from phalanx.launcher.hangs.cluster_progress import ClusterProgress, NodeHeartbeat
from phalanx.launcher.hangs.detector import ErrorBackoff, HangDetector
from phalanx.launcher.hangs.hang_action import FormAgain, KillRanks, OnHang, StopRun, WaitLonger
from phalanx.launcher.hangs.progress_tracker import RankProgress

GONE = Verdict(kind="uneven data", ranks=(0,), text="rank 0 left the loop earlier", fix="the same number of batches")
HERE = Verdict(kind="sleep", ranks=(1, 2), text="ranks 1, 2 are sleeping", certain=False)
PARTED = Verdict(kind="partition", ranks=(2,), text="node 1 and node 2 do not reach each other")
TOGETHER = Verdict(kind="network", ranks=(), text="all 3 ranks wait in the same collective", certain=False)
BEHIND = Verdict(kind="network", ranks=(0, 1), text="ranks 0, 1 are still in all_gather, which rank 2 has left behind")
LATE = Verdict(kind="join", ranks=(1,), text="rank 1 has not reached init_process_group")
NEVER = Verdict(kind="join", ranks=(3,), text="rank 3 of 4 has never joined")
APART = Verdict(kind="join", ranks=(), text="all 3 ranks are in init_process_group and do not meet")
LOOP = Verdict(kind="loop", ranks=(1,), text="rank 1 is in a loop")
STOPPED = StopRun("the run is stalled and was stopped (--on-hang stop): rank 0 left the loop earlier", GONE.fix)

STALLED = StopRun(f"the run is stalled and was stopped (--on-hang stop): {TOGETHER.text}", TOGETHER.fix)


@pytest.mark.parametrize(
    ("on_hang", "verdicts", "waited", "action"),
    [
        ("report", [HERE], 9.0, None),
        ("report", [LOOP], 9.0, None),
        ("stop", [GONE, HERE], 9.0, STOPPED),
        ("stop", [LOOP], 9.0, WaitLonger(LONGER * 10 - 9)),
        ("kill", [LOOP], LONGER * 10, KillRanks(frozenset({1}))),
        ("kill", [HERE], 9.0, KillRanks(frozenset({1, 2}))),
        ("kill", [GONE, HERE], 9.0, KillRanks(frozenset({1, 2}))),  # rank 0 has ended: it cannot be killed
        ("kill", [GONE], 9.0, KillRanks(frozenset())),
        ("kill", [TOGETHER], 9.0, FormAgain(2)),
        ("kill", [TOGETHER, HERE], 9.0, KillRanks(frozenset({1, 2}))),
        ("kill", [BEHIND], 9.0, FormAgain(1)),  # two ranks may have all copies of a shard
        ("kill", [NEVER], 9.0, KillRanks(frozenset())),
        ("kill", [APART], 9.0, WaitLonger(LONGER * 10 - 9)),
        ("kill", [APART], LONGER * 10, FormAgain(2)),
        ("stop", [TOGETHER], 9.0, STALLED),
    ],
)
def test_the_action_on_a_stall(on_hang: OnHang, verdicts: list[Verdict], waited: float, action: object) -> None:
    ranks = [Rank(rank=number, node=0, ended=0 if number == 0 else None) for number in range(3)]
    evidence = Evidence(time=0.0, waited=waited, ranks=tuple(ranks), limit=10.0)
    assert hang_action.choose(on_hang, evidence, verdicts) == action


def test_a_recovery_that_stalls_is_tried_again_even_if_stalls_are_only_reported() -> None:
    """Unless a rank is to blame, or the user wants the run to end."""
    evidence = Evidence(time=0.0, waited=9.0, ranks=tuple(Rank(rank=number, node=0) for number in range(3)), limit=10.0)
    assert hang_action.choose("report", evidence, [TOGETHER]) is None
    assert hang_action.choose("report", evidence, [TOGETHER], recovering=True) == FormAgain(2)
    assert hang_action.choose("report", evidence, [TOGETHER, HERE], recovering=True) is None
    assert hang_action.choose("report", evidence, [BEHIND], recovering=True) == FormAgain(1)
    assert hang_action.choose("report", evidence, [BEHIND]) is None
    assert hang_action.choose("report", evidence, [BEHIND, TOGETHER], recovering=True) == FormAgain(1)
    assert hang_action.choose("report", evidence, [TOGETHER, BEHIND], recovering=True) == FormAgain(1)
    assert hang_action.choose("report", evidence, [LATE], recovering=True) is None
    assert hang_action.choose("report", evidence, [NEVER], recovering=True) is None
    assert hang_action.choose("report", evidence, [LOOP], recovering=True) is None
    assert hang_action.choose("stop", evidence, [TOGETHER], recovering=True) == STALLED


def test_a_group_of_many_ranks_has_time_to_connect() -> None:
    ranks = tuple(Rank(rank=number, node=0) for number in range(3))
    soon, late = (Evidence(time=0.0, waited=waited, ranks=ranks, limit=10.0) for waited in (11.0, 10.0 * LONGER))
    assert hang_action.choose("report", soon, [APART], recovering=True) == WaitLonger(10.0 * LONGER - 11.0)
    assert hang_action.choose("report", late, [APART], recovering=True) == FormAgain(2)
    assert hang_action.choose("report", soon, [APART]) is None


@pytest.mark.parametrize("verdict", [TOGETHER, BEHIND])
@pytest.mark.parametrize("on_hang", ["report", "kill"])
def test_the_only_rank_with_the_state_is_not_killed_to_form_a_group_again(on_hang: OnHang, verdict: Verdict) -> None:
    """Ranks that were started to replace others have made no step yet."""
    steps = {0: 5, 1: -1, 2: -1, 3: 5}
    ranks = tuple(Rank(rank=rank, node=0, step=step) for rank, step in steps.items())
    evidence = Evidence(time=0.0, waited=11.0, ranks=ranks, limit=10.0)
    again = hang_action.choose(on_hang, evidence, [verdict], recovering=True)
    assert again == FormAgain(2 if verdict is TOGETHER else 1)


def test_a_node_that_others_do_not_reach_is_dismissed_whatever_on_hang_says() -> None:
    for on_hang in ("report", "kill"):
        assert hang_action.cut_off(on_hang, [HERE, PARTED]) == PARTED
        assert hang_action.cut_off(on_hang, [HERE, GONE]) is None
    assert hang_action.cut_off("stop", [PARTED]) is None
    # If it cannot be dismissed: killed ranks would be replaced on the same node, and hang again.
    evidence = Evidence(time=0.0, waited=9.0, ranks=(Rank(rank=2, node=2),), limit=10.0)
    assert hang_action.choose("report", evidence, [PARTED]) is None
    action = hang_action.choose("kill", evidence, [PARTED])
    assert isinstance(action, StopRun)
    assert PARTED.text in action.why
    assert "-n MIN:MAX" in action.fix


def test_a_node_that_stalls_before_its_first_step_is_to_blame_whatever_on_hang_says() -> None:
    others = Verdict(kind="waiting", ranks=(0,), text="rank 0 has made no progress")
    early, late = (Evidence(time=0.0, waited=waited, ranks=(), limit=10.0) for waited in (9.0, LONGER * 10))
    assert hang_action.newcomer(early, [others, HERE], {2, 3}) == HERE
    assert hang_action.newcomer(early, [others, HERE], {3}) == others  # it waits for the newcomer
    assert hang_action.newcomer(early, [HERE], set()) is None
    assert hang_action.newcomer(early, [LOOP], {1}) == WaitLonger(LONGER * 10 - 9)
    assert hang_action.newcomer(late, [LOOP], {1}) == LOOP


class Detected:
    """A detector on node 0, with the verdicts that it finds, and all that it does."""

    def __init__(self, folder: Path, on_hang: OnHang, on_trial: frozenset[int], *, dismisses: bool = True) -> None:
        self.notes: list[str] = []
        self.dismissed: list[tuple[list[int], str]] = []
        self.failed: list[str] = []
        self.dismisses = dismisses
        self.formed = 1  # the newest group that has committed a step
        self.killed: list[int] = []
        workers = SimpleNamespace(
            formed=lambda generation: generation == self.formed,
            send_signal=lambda name, _: self.killed.append(int(name)),
        )
        seats = [
            SimpleNamespace(seat=SimpleNamespace(rank=rank), spare=False, exit=SimpleNamespace()) for rank in (0, 1)
        ]
        living = [(str(one.seat.rank), one) for one in seats]
        self.attempt = SimpleNamespace(generation=1, stopping=False, held="", living=living, workers=workers)
        self.agent = SimpleNamespace(
            plan=SimpleNamespace(hang=SimpleNamespace(action=on_hang, stall_timeout=10.0)),
            attempt=self.attempt,
            note=self.notes.append,
            say=self.notes.append,
            fail=lambda error: self.failed.append(str(error)),
        )
        serves = SimpleNamespace(serve=lambda *_: None, on=lambda *_: None)
        context: Any = SimpleNamespace(
            agent=self.agent,
            links=SimpleNamespace(
                leads=True, members=dict, on_trial=lambda: on_trial, dismiss=self._dismiss, nodes=lambda: ()
            ),
            rpc=serves,
            control=serves,
            folder=SimpleNamespace(path=str(folder), event=lambda _: None),
        )
        self.detector = HangDetector(context, stats=Any, attempt=self.attempt)  # type: ignore[arg-type]

    def _dismiss(self, ranks: Sequence[int], why: str) -> bool:
        if self.dismisses:
            self.dismissed.append((list(ranks), why))
        return self.dismisses

    def watch(self) -> None:
        """Look at the ranks, which make progress."""
        self.detector._progress.heartbeat = lambda _: NodeHeartbeat(node=0, host="", ranks=())  # type: ignore[method-assign]
        assert self.detector.observe(SimpleNamespace(last=False, now=0.0, attempt=self.attempt, due=True)) is not None  # type: ignore[arg-type]

    def diagnose(self, *verdicts: Verdict, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Handle a stall of 11 seconds with these verdicts. `meanwhile`: while evidence is gathered."""

        async def explain() -> tuple[Evidence, list[Verdict]]:
            meanwhile()
            ranks = tuple(Rank(rank=worker.seat.rank, node=0) for _, worker in self.attempt.living)
            return Evidence(time=0.0, waited=11.0, ranks=ranks, limit=10.0), [*verdicts]

        self.detector.explain = explain  # type: ignore[method-assign]
        asyncio.run(self.detector._diagnose(self.attempt, 10.0))  # type: ignore[arg-type]


BUSY = Verdict(kind="waiting", ranks=(0,), text="rank 0 waits for rank 1")


def test_a_node_on_trial_is_dismissed_instead_of_what_on_hang_says(tmp_path: Path) -> None:
    """If it may only be slow, all wait. If it cannot be dismissed, --on-hang decides."""
    found = Detected(tmp_path, "stop", frozenset({1, 2, 3}))
    found.diagnose(BUSY, HERE)
    assert (found.dismissed, found.failed) == ([([1, 2], HERE.text)], [])
    found.diagnose(BUSY)
    assert found.dismissed[1:] == [([1, 2, 3], BUSY.text)]
    found.diagnose(BUSY, LOOP)
    assert (found.dismissed[2:], found.failed) == ([], [])
    assert found.notes[-1] == f"the rank may only be slow: the node that joined gets another {LONGER * 10 - 11:.0f} s"
    assert found.detector._recheck is not None
    alone = Detected(tmp_path, "stop", frozenset({1}), dismisses=False)
    alone.diagnose(HERE)
    assert alone.failed == [f"the run is stalled and was stopped (--on-hang stop): {HERE.text}"]


def test_a_group_that_stalls_before_its_first_step_is_formed_again_a_few_times(tmp_path: Path) -> None:
    found = Detected(tmp_path, "report", frozenset())
    found.diagnose(TOGETHER)
    assert found.killed == []  # it has committed a step: the stall is only reported
    for generation in (2, 3, 4):
        found.attempt.generation = generation
        found.diagnose(TOGETHER)
    assert found.killed == [1, 1]
    assert "rank 1 is killed, so that the group forms again, with new connections" in found.notes
    found.formed = 4
    found.watch()
    found.attempt.generation = 5
    found.diagnose(TOGETHER)
    assert found.killed == [1, 1, 1]


@pytest.mark.parametrize("on_trial", [frozenset[int](), frozenset({1})])
def test_evidence_of_another_group_has_no_consequences(on_trial: frozenset[int], tmp_path: Path) -> None:
    """While it was gathered, a node joined or left: ranks have other numbers, and the newcomer was not there."""
    found = Detected(tmp_path, "stop", on_trial)
    found.diagnose(HERE, meanwhile=lambda: setattr(found.attempt, "generation", 2))
    assert (found.dismissed, found.failed, found.notes) == ([], [], [])
    assert found.detector.final_report == ""


def test_a_group_that_forms_while_a_verdict_is_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Detected(tmp_path, "stop", frozenset())
    monkeypatch.setattr(detector.report, "text", lambda *_: setattr(found.attempt, "generation", 2) or "stalled")
    found.diagnose(HERE)
    assert (found.failed, len(found.notes)) == ([], 1)


def _progress(members: dict[int, tuple[int, ...]], nodes: int = 3) -> ClusterProgress:
    group = SimpleNamespace(node_rank=0, node_count=nodes)
    plan = SimpleNamespace(group=group, hang=SimpleNamespace(stall_timeout=30.0))
    agent: Any = SimpleNamespace(plan=plan)
    links: Any = SimpleNamespace(members=lambda: members, leads=True)
    return ClusterProgress(agent, links, None)


def _reading(**changed: object) -> Any:
    workers = SimpleNamespace(ending=False, debugged=frozenset())
    usual = {"held": "", "stopping": False, "over": asyncio.Event(), "workers": workers}
    attempt = SimpleNamespace(**{**usual, "number": 0, "generation": 0, **changed})
    return SimpleNamespace(attempt=attempt, workers=())


def test_no_progress_is_expected_of_ranks_that_are_meant_to_wait() -> None:
    """Too few nodes remain: with --on-hang kill, trained state would be lost."""
    progress = _progress({1: (1,)})
    assert progress.heartbeat(_reading()) is not None
    assert progress.generation == (0, 0)
    assert progress.heartbeat(_reading(held="node 2 is lost")) is None
    assert progress.generation is None


def test_ranks_of_other_nodes_may_stall_after_ours_have_ended() -> None:
    over = asyncio.Event()
    over.set()
    assert _progress({1: (1,)}).heartbeat(_reading(over=over)) is not None
    assert _progress({}).heartbeat(_reading(over=over)) is None


def test_the_progress_of_all_nodes() -> None:
    members = {1: (1,), 2: (2,)}
    progress = _progress(members)
    theirs = NodeHeartbeat(node=1, host="b", ranks=(RankProgress(rank=1, step=5),))
    progress.receive(1, encoding.encode(theirs))
    own = progress.heartbeat(_reading())
    assert own is not None
    progress.update(NodeHeartbeat(node=0, host="a", ranks=(RankProgress(rank=0, step=7),)))
    assert progress.tracker is not None
    assert {rank: each.step for rank, each in progress.tracker.ranks.items()} == {0: 7, 1: 5}
    assert progress.last_heartbeat(1)[1] == theirs
    del members[1]
    progress.update(own)
    assert progress.last_heartbeat(1) == (0.0, None)


@pytest.mark.parametrize(("nodes", "quiet", "stall_timeout"), [(3, 3.0, 30.0), (4096, 12.0, 33.0)])
def test_nodes_that_report_less_often_are_given_more_time(nodes: int, quiet: float, stall_timeout: float) -> None:
    progress = _progress({1: (1,)}, nodes)
    own = progress.heartbeat(_reading())
    assert own is not None
    assert progress.tracker is not None
    assert progress.tracker._watch.stall_timeout == stall_timeout
    progress.receive(1, encoding.encode(NodeHeartbeat(node=1, host="b", ranks=(RankProgress(rank=1),))))
    for late, silent in ((quiet - 1, False), (quiet + 1, True)):
        _, heartbeat = progress._received[1]
        progress._received[1] = (time.monotonic() - late, heartbeat)
        progress.update(own)
        assert (progress.tracker.ranks[1].silent > 0) == silent


def test_hang_detection_gives_up_after_several_errors() -> None:
    backoff, now = ErrorBackoff(), 100.0
    for error in range(5):
        assert backoff.allows(now)
        assert backoff.failed(now) == (error == 4)
        assert not backoff.allows(now)
        now += 1000
    assert not backoff.allows(now)
    backoff.succeeded()
    assert backoff.allows(now)
