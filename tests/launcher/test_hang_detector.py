"""What is done about a stall, and what is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.diagnose.evidence import Evidence, Rank
from phalanx.diagnose.verdict import Verdict
from phalanx.launcher.hangs.detector import HangDetector

GONE = Verdict(kind="uneven data", ranks=(0,), text="rank 0 left the loop earlier")
HERE = Verdict(kind="sleep", ranks=(1, 2), text="ranks 1, 2 are sleeping", certain=False)


@pytest.mark.parametrize(
    ("verdicts", "here", "there", "noted"),
    [
        ([HERE], (1, 2), (2,), "rank 2 stalled: SIGKILL by its node"),
        ([GONE, HERE], (1, 2), (2,), "rank 2 stalled: SIGKILL by its node"),  # who has ended cannot be killed
        ([GONE], (), None, "no living rank is to blame"),
    ],
)
def test_who_is_killed(verdicts: list[Verdict], here: tuple[int, ...], there: tuple[int, ...], noted: str) -> None:
    notes, killed, sent = list[str](), list[tuple[int, ...]](), list[bytes]()
    plan = SimpleNamespace(hang=SimpleNamespace(action="kill"))
    stub: Any = SimpleNamespace(
        _agent=SimpleNamespace(plan=plan, note=notes.append),
        _coordinator=SimpleNamespace(members=lambda: {1: (2,)}),
        _rpc=SimpleNamespace(send=lambda _, __, content, to: sent.append(content)),
        _kill=lambda ranks: killed.append(tuple(sorted(ranks))),
    )
    ranks = [Rank(rank=number, node=0, ended=0 if number == 0 else None) for number in range(3)]
    HangDetector._act(cast("HangDetector", stub), Evidence(time=0.0, waited=9.0, ranks=tuple(ranks)), verdicts)
    assert killed == [here]
    assert sent == ([] if there is None else [b"[2]"])
    assert noted in notes[0]


def test_ranks_that_are_meant_to_wait_are_not_looked_at() -> None:
    """Too few nodes are left: with --on-hang kill that would cost what was trained."""
    attempt = SimpleNamespace(held="node 2 is lost", stopping=False, ending=False, over=asyncio.Event())
    stub: Any = SimpleNamespace(
        _agent=SimpleNamespace(attempt=attempt, plan=None),
        _coordinator=SimpleNamespace(members=dict, leads=True),
        _attempt=None,
        _tracker="something",
    )
    reading: Any = SimpleNamespace(attempt=attempt)
    assert HangDetector._check(cast("HangDetector", stub), reading) is None
    assert stub._tracker is None
