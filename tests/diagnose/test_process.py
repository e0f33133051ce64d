"""Table: verdicts from facts about a process or a node."""

from __future__ import annotations

import pytest

from phalanx.diagnose.evidence import Gpu, NodeFacts, Rank
from tests.diagnose.made_evidence import (
    HERE,
    Case,
    behind,
    beside,
    evidence,
    named_right,
    process,
    waiting,
)

PROVEN: dict[str, Case] = {
    "stopped": (
        beside(behind(3, [HERE], proc=process("T"))),
        "stopped",
        (3,),
        ["rank 3 is stopped (SIGSTOP)", "the other 3 wait"],
    ),
    "stopped in a collective": (
        beside(waiting(3, proc=process("T"))),
        "stopped",
        (3,),
        ["rank 3 is stopped", "the other 3 wait for it"],
    ),
    "stopped, and steps are slow": (
        evidence(
            behind(2, [HERE], proc=process("T")),
            *(waiting(number, usual=1.0, since=2.1) for number in (0, 1)),
            waited=2.1,
        ),
        "stopped",
        (2,),
        ["rank 2 is stopped", "the other 2 wait for it"],
    ),
    "traced": (beside(behind(3, [HERE], proc=process("t"))), "traced", (3,), ["held by a tracer"]),
    "swapping": (
        beside(
            behind(1, [HERE], proc=process("D", swapped=3_200_000_000, major_faults=900.0)),
            nodes=[NodeFacts(node=0, host="a", memory=16_000_000_000, available=100_000_000)],
        ),
        "memory",
        (1,),
        ["rank 1 is out of memory and swapping (3.2 GB on disk)", "train.py:33"],
    ),
    "GIL, spinning": (
        beside(behind(2, [HERE], proc=process("R"), silent=38.0)),
        "gil",
        (2,),
        ["rank 2 spins holding the GIL at train.py:33 in flush"],
    ),
    "GIL, asleep": (
        beside(behind(2, [HERE], proc=process(wchan="hrtimer_nanosleep"), silent=38.0)),
        "gil",
        (2,),
        ["rank 2 holds the GIL while sleeping at train.py:33"],
    ),
    "GPU": (
        beside(waiting(1, gpu=Gpu(index=5, use=0.0, lost=True)), nodes=[NodeFacts(node=0, host="b")]),
        "gpu lost",
        (1,),
        ["GPU 5 of node b"],
    ),
    "node lost": (
        evidence(
            waiting(0, node=0),
            waiting(1, seq=213, node=1),
            nodes=[NodeFacts(node=0, host="a"), NodeFacts(node=1, host="b", lost=True)],
        ),
        "node",
        (1,),
        ["node b (rank 1) does not answer"],
    ),
    "node that has not reported its ranks": (
        evidence(
            waiting(0, node=0, size=2),
            Rank(rank=1, node=1, note="its node has not answered for 2 s", since=40.0),
            nodes=[NodeFacts(node=0, host="a"), NodeFacts(node=1, host="b", silent=2.0)],
        ),
        "node",
        (1,),
        ["node b (rank 1) does not answer: link down"],
    ),
    "node silent": (
        evidence(
            waiting(0, node=0),
            waiting(1, seq=213, node=1),
            nodes=[NodeFacts(node=1, host="b", silent=12.0, finding="link down: eth1")],
        ),
        "node",
        (1,),
        ["node b (rank 1) does not answer: link down: eth1"],
    ),
}


@pytest.mark.parametrize("case", PROVEN)
def test_named_right(case: str) -> None:
    verdict = named_right(PROVEN[case])
    assert verdict.certain == (case != "node that has not reported its ranks")
