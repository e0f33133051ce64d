"""Any evidence: no exception, and no verdict names a rank that does not exist."""

from __future__ import annotations

import random
import re

import pytest

from phalanx.diagnose import report
from phalanx.diagnose.diagnosis import diagnose, remarks
from phalanx.diagnose.evidence import (
    CallEvidence,
    Evidence,
    Frame,
    Gpu,
    GroupEvidence,
    History,
    NodeFacts,
    Process,
    Rank,
    Recorded,
    Signature,
    ThreadStack,
)
from tests.diagnose.made_evidence import backward, collective, frame, loading, workers

OPS = ("all_reduce", "broadcast", "barrier", "all_gather", "send", "recv", "")
WCHANS = ("", "futex_do_wait", "hrtimer_nanosleep", "nfs_wait", "poll_schedule_timeout")
STACKS = [
    [],
    backward(),
    workers(),
    loading(frame("dataset.py", 4, "read")),
    [frame("train.py", 3, guard="if rank == 0", loop=2, source="x()")],
    *(collective(op) for op in ("all_reduce", "send", "init_process_group", "new_group", "destroy_process_group")),
]
PHASES = ("import", "data", "backward", "collective", "checkpoint", "compile", "idle")


def some(dice: random.Random) -> Evidence:
    count = dice.choice((0, 1, 2, 3, 4, 6))
    ranks = [_rank(dice, number) for number in dice.sample(range(8), count)]
    return Evidence(
        time=0.0,
        waited=dice.choice((0.0, 5.0, 40.0, 4000.0)),
        ranks=tuple(ranks),
        nodes=tuple(_node(dice, number) for number in range(dice.randrange(3))),
        world_size=dice.choice((0, count, 8)),
        finding=dice.choice(("", "link down")),
    )


def _rank(dice: random.Random, number: int) -> Rank:
    names = dice.sample(("0", "x", "y"), dice.randrange(3))
    threads = [
        ThreadStack(
            name="m", frames=tuple(dice.choice(STACKS)), main=dice.random() < 0.9, holds_gil=dice.random() < 0.1
        )
    ]
    return Rank(
        rank=number,
        node=dice.randrange(3),
        step=dice.choice((-1, 0, 9)),
        usual=dice.choice((0.0, 0.1, 100.0)),
        phase=dice.choice(PHASES),
        since=dice.choice((0.0, 5.0, 40.0, 4000.0)),
        silent=dice.choice((0.0, 0.0, 0.0, 40.0)),
        busy=dice.random() < 0.2,
        threads=tuple(threads[: dice.randrange(2)]),
        groups=tuple(
            GroupEvidence(
                name=name,
                backend=dice.choice(("gloo", "nccl", "")),
                ranks=tuple(dice.sample(range(-1, 12), dice.randrange(6))),
                enqueued=dice.randrange(-1, 5),
            )
            for name in names
        ),
        calls=tuple(_call(dice) for _ in range(dice.randrange(6))),
        history=_history(dice) if dice.random() < 0.6 else History(),
        process=_process(dice) if dice.random() < 0.8 else None,
        gpu=Gpu(index=0, use=dice.random(), lost=dice.random() < 0.1) if dice.random() < 0.3 else None,
        ended=dice.choice((None, None, None, None, 0, 1, -9, -77)),
        note=dice.choice(("", "no page")),
        debugged=dice.random() < 0.02,
    )


def _history(dice: random.Random) -> History:
    signatures = [
        Signature(
            op=dice.choice(OPS),
            called=dice.choice(("", "all_reduce")),
            dtypes=dice.choice(((), ("float32",), ("int64",))),
            shapes=dice.choice(((), ((),), ((3, 0),), ((4,), (5,)))),
            outputs=dice.choice(((), ((1,), (2,)))),
            root=dice.choice((None, 0)),
            site=dice.randrange(-1, 1),
        )
        for _ in range(3)
    ]
    count = dice.randrange(6)
    numbers = sorted(dice.choices(range(1, 5), k=count))
    group = Recorded(
        group=dice.choice(("0", "x")),
        backend=dice.choice(("nccl", "gloo")),
        seqs=tuple(numbers),
        kinds=tuple(dice.choices(range(3), k=count)),
    )
    return History(sites=(tuple(dice.choice(STACKS)),), signatures=tuple(signatures), groups=(group,))


def _call(dice: random.Random) -> CallEvidence:
    site: tuple[Frame, ...] = tuple(dice.choice(STACKS))
    return CallEvidence(
        group=dice.choice(("0", "x", "y", "unheard of")),
        seq=dice.randrange(-1, 5),
        op=dice.choice(OPS),
        dtypes=dice.choice(((), ("Float",), ("what",))),
        shapes=dice.choice(((), ((),), ((3, 0),), ((4,), (5,)))),
        outputs=dice.choice(((), ((1,), (2,)))),
        done=dice.random() < 0.4,
        site=site,
        peer=dice.choice((None, 0, 1, 5, 99, -1)),
        tag=dice.choice((None, 0, 3)),
        reduction=dice.choice(("", "SUM", "MAX")),
        root=dice.choice((None, None, 0, 1)),
        backend=dice.choice(("", "nccl")),
        started=dice.choice((None, True, False)),
    )


def _process(dice: random.Random) -> Process:
    return Process(
        pid=7,
        state=dice.choice("RSSSDTtZX?"),
        cpu=dice.random(),
        swapped=dice.choice((0, 10**10)),
        major_faults=dice.choice((0.0, 900.0)),
        wchan=dice.choice(WCHANS),
        children=dice.choice(((), ("77 Z pt_data_worker",), ("odd",), ("",), ("5 S sleep 100",))),
    )


def _node(dice: random.Random, number: int) -> NodeFacts:
    return NodeFacts(
        node=number,
        host=dice.choice(("", "a")),
        lost=dice.random() < 0.1,
        memory=dice.choice((0, 100)),
        available=1,
    )


@pytest.mark.parametrize("seed", range(4))
def test_any(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        seen = some(dice)
        there = {rank.rank for rank in seen.ranks} | set(range(seen.world_size))
        verdicts = diagnose(seen)
        for verdict in verdicts:
            assert set(verdict.ranks) <= there, verdict
            assert verdict.text
            named = re.findall(r"\brank (-?\d+) (?:is|has|waits|called|left|skipped|alone)", verdict.text)
            assert {int(each) for each in named} <= there, verdict
        assert report.text(seen, verdicts)
        assert report.as_json(seen, verdicts)
        assert isinstance(remarks(seen), list)
