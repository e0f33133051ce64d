"""Builds evidence of a stalled run in a few words: the main thread, collectives and process of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import (
    CallEvidence,
    Evidence,
    Frame,
    GroupEvidence,
    NodeFacts,
    Process,
    Rank,
    ThreadStack,
    decode,
    encode,
)
from phalanx.diagnose.verdict import Verdict

HOME = "/home/user/work/"
LIB = "/home/user/.venv/lib/python3.11/site-packages/"
STD = "/usr/lib/python3.11/"
C10D = LIB + "torch/distributed/distributed_c10d.py"
LOADER = LIB + "torch/utils/data/dataloader.py"
WORK = LIB + "phalanx/collectives/process_group/work.py"
DDP = LIB + "torch/nn/parallel/distributed.py"

Case = tuple[Evidence, str, tuple[int, ...], list[str]]  # evidence -> kind, ranks, what the text must contain


def frame(file: str, line: int, function: str = "<module>", **more: Any) -> Frame:
    return Frame(file if file.startswith(("/", "<")) else HOME + file, line, function, **more)


def collective(op: str, line: int = 52, file: str = "train.py", function: str = "<module>", **more: Any) -> list[Frame]:
    """Return the frames of a main thread in a collective, as Python shows them."""
    wrapper = frame(LIB + "torch/distributed/c10d_logger.py", 83, "wrapper")
    return [frame(C10D, 3252, op), wrapper, frame(file, line, function, **more)]


def backward(line: int = 60, function: str = "<module>", **more: Any) -> list[Frame]:
    return [
        frame(LIB + "torch/autograd/graph.py", 979, "_engine_run_backward"),
        frame(LIB + "torch/autograd/__init__.py", 395, "backward"),
        frame(LIB + "torch/_tensor.py", 623, "backward"),
        frame("train.py", line, function, **more),
    ]


def loading(*inner: Frame, line: int = 50) -> list[Frame]:
    """Return the frames of a main thread that loads data without workers."""
    return [
        *inner,
        frame(LIB + "torch/utils/data/_utils/fetch.py", 54, "fetch"),
        frame(LOADER, 785, "_next_data"),
        frame(LOADER, 725, "__next__"),
        frame("train.py", line),
    ]


def workers(line: int = 50) -> list[Frame]:
    """Return the frames of a main thread that waits for DataLoader workers."""
    return [
        frame(STD + "selectors.py", 415, "select"),
        frame(STD + "multiprocessing/connection.py", 947, "wait"),
        frame(STD + "multiprocessing/queues.py", 113, "get"),
        frame(LOADER, 1291, "_try_get_data"),
        frame(LOADER, 1464, "_get_data"),
        frame(LOADER, 725, "__next__"),
        frame("train.py", line),
    ]


def call(
    op: str, seq: int, *shape: int, group: str = "0", done: bool = False, dtype: str = "Float", **more: Any
) -> CallEvidence:
    dtypes = (dtype,) if shape else ()
    return CallEvidence(group=group, seq=seq, op=op, shapes=(shape,) if shape else (), dtypes=dtypes, done=done, **more)


def past(count: int, *pattern: CallEvidence) -> list[CallEvidence]:
    """Return finished calls 1 to `count`, which repeat a pattern."""
    return [msgspec.structs.replace(pattern[index % len(pattern)], seq=index + 1, done=True) for index in range(count)]


def process(state: str = "S", **more: Any) -> Process:
    more.setdefault("cpu", 1.0 if state == "R" else 0.0)
    return Process(pid=4000, state=state, **more)


def rank(
    number: int,
    stack: Sequence[Frame] = (),
    calls: Sequence[CallEvidence] = (),
    *,
    groups: Sequence[GroupEvidence] | None = None,
    proc: Process | None = None,
    size: int = 4,
    **more: Any,
) -> Rank:
    if groups is None:
        seqs = [each.seq for each in calls if each.group == "0"]
        done = [each.seq for each in calls if each.group == "0" and each.done]
        groups = [group("0", range(size), max(seqs, default=-1), max(done, default=-1))] if seqs else []
    more.setdefault("since", 40.0)
    threads = (ThreadStack(name="MainThread", frames=tuple(stack), main=True),) if stack else ()
    return Rank(
        rank=number,
        node=more.pop("node", 0),
        threads=threads,
        calls=tuple(calls),
        groups=tuple(groups),
        process=proc or process(),
        **more,
    )


def group(name: str, ranks: Sequence[int], enqueued: int, completed: int = -1, backend: str = "gloo") -> GroupEvidence:
    return GroupEvidence(name=name, backend=backend, ranks=tuple(ranks), enqueued=enqueued, completed=completed)


def waiting(number: int, op: str = "all_reduce", seq: int = 214, *shape: int, line: int = 52, **more: Any) -> Rank:
    """Return a rank in a collective that is not done."""
    shape = shape or (1_625_000,)
    return rank(number, collective(op, line), [call(op, seq - 1, *shape, done=True), call(op, seq, *shape)], **more)


def behind(number: int, stack: Sequence[Frame], seq: int = 213, **more: Any) -> Rank:
    """Return a rank that has finished all its calls and does something else."""
    return rank(number, stack, [call("all_reduce", seq, 1_625_000, done=True)], **more)


def evidence(*ranks: Rank, waited: float = 40.0, nodes: Sequence[NodeFacts] = (), **more: Any) -> Evidence:
    more.setdefault("world_size", len(ranks))
    return Evidence(time=1000.0, waited=waited, ranks=tuple(ranks), nodes=tuple(nodes), **more)


def beside(*culprits: Rank, size: int = 4, **more: Any) -> Evidence:
    """Return the other ranks, which wait in all_reduce #214 at train.py:52."""
    named = {each.rank for each in culprits}
    ranks = [*culprits, *(waiting(number, size=size) for number in range(size) if number not in named)]
    return evidence(*sorted(ranks, key=lambda each: each.rank), **more)


HERE = frame("train.py", 33, "flush")
ITEM = frame("dataset.py", 41, "__getitem__")
GETS = frame(STD + "threading.py", 327, "wait")


def named_right(case: Case) -> Verdict:
    """Check the first verdict, for evidence that was encoded and decoded."""
    seen, kind, ranks, texts = case
    verdicts = diagnose(decode(encode(seen)))
    assert verdicts, "no verdict"
    first = verdicts[0]
    assert (first.kind, first.ranks) == (kind, ranks), first.text
    for words in texts:
        assert words in first.text, first.text
    return first
