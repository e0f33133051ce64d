"""Table: ranks that did not call the same collectives."""

from __future__ import annotations

import pytest

from phalanx.diagnose.evidence import CallEvidence, Evidence
from tests.diagnose.made_evidence import (
    DDP,
    ITEM,
    Case,
    backward,
    call,
    collective,
    evidence,
    frame,
    loading,
    named_right,
    past,
    rank,
)

IN_LOOP = {"loop": 48, "source": "dist.all_reduce(loss)"}
AFTER_LOOP = {"loop": 0, "source": "dist.barrier()"}


def diverged(
    odd: list[CallEvidence], odd_stack: list, usual: list[CallEvidence], stack: list, culprit: int = 0
) -> Evidence:
    """Return four ranks, one of which has made other calls."""
    return evidence(
        *(
            rank(number, odd_stack if number == culprit else stack, odd if number == culprit else usual)
            for number in range(4)
        )
    )


REDUCE, NORM, BARRIER = call("all_reduce", 0, 10), call("all_reduce", 0, 1), call("barrier", 0)
LOOP = past(8, REDUCE, NORM)  # calls 1 to 8; the next is REDUCE
BUCKETS = past(
    8, call("all_reduce", 0, 100), call("all_reduce", 0, 200), call("all_reduce", 0, 1), call("broadcast", 0, 3)
)

DESYNC: dict[str, Case] = {
    "more inside a condition": (
        diverged(
            [*LOOP, call("barrier", 9)],
            collective("barrier", 88, guard="if rank == 0"),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 52),
        ),
        "skipped collective",
        (0,),
        [
            "rank 0 called one more collective than the others",
            "`if rank == 0`",
            "train.py:88",
            "all_reduce #9",
            "train.py:52",
        ],
    ),
    "fewer, by a condition": (
        diverged(
            [*LOOP, call("barrier", 9)],
            collective("barrier", 95),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 88, guard="if rank != 0"),
        ),
        "skipped collective",
        (0,),
        ["rank 0 skipped a collective that the other 3 called inside `if rank != 0` at train.py:88", "barrier #9"],
    ),
    "fewer, by what the loop did before": (
        diverged(
            [*LOOP, call("all_reduce", 9, 1)],
            collective("all_reduce", 54),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 52),
            culprit=2,
        ),
        "skipped collective",
        (2,),
        ["rank 2 skipped a collective", "train.py:52", "continued to all_reduce #9 at train.py:54"],
    ),
    "another operation": (
        diverged(
            [call("broadcast", 3, 4)],
            collective("broadcast", 20),
            [call("all_reduce", 3, 4)],
            collective("all_reduce", 22),
            1,
        ),
        "wrong operation",
        (1,),
        ["rank 1 called broadcast at train.py:20 where the other 3 called all_reduce at train.py:22 (#3)"],
    ),
    "another operation, each in its branch": (
        diverged(
            [*LOOP, call("broadcast", 9, 4)],
            collective("broadcast", 20, guard="if rank == 1"),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 22, guard="else of if rank == 1"),
            1,
        ),
        "wrong operation",
        (1,),
        ["rank 1 called broadcast", "the other 3 called all_reduce"],
    ),
    "a root that is done before the others come": (
        diverged(
            [call("broadcast", 3, 4, done=True)],
            loading(ITEM),
            [call("all_reduce", 3, 4)],
            collective("all_reduce", 22),
            1,
        ),
        "wrong operation",
        (1,),
        ["rank 1 called broadcast where the other 3 called all_reduce"],
    ),
    "shapes": (
        diverged(
            [call("all_reduce", 3, 10)],
            collective("all_reduce"),
            [call("all_reduce", 3, 12)],
            collective("all_reduce"),
            3,
        ),
        "shapes differ",
        (3,),
        ["shapes differ in all_reduce #3 at train.py:52: rank 3 has [10], the other 3 have [12]"],
    ),
    # A rank in the next collective no longer reports the reduction of this one.
    "shapes, and continued": (
        evidence(
            *(
                rank(
                    number,
                    collective("all_reduce" if stays else "barrier", line=52 if stays else 53),
                    [
                        call("all_reduce", 3, size, reduction="SUM" if stays else "", done=not stays),
                        *([] if stays else [call("barrier", 4)]),
                    ],
                )
                for number, size, stays in ((0, 12, True), (1, 12, False), (2, 12, True), (3, 10, False))
            )
        ),
        "shapes differ",
        (3,),
        ["shapes differ in all_reduce #3", "rank 3 has [10], the other 3 have [12]"],
    ),
    "dtypes": (
        diverged(
            [call("all_reduce", 3, 10, dtype="Half")],
            collective("all_reduce"),
            [call("all_reduce", 3, 10)],
            collective("all_reduce"),
        ),
        "dtypes differ",
        (0,),
        ["dtypes differ", "rank 0 has Half, the other 3 have Float"],
    ),
    "reductions": (
        diverged(
            [call("all_reduce", 3, 10, reduction="MAX")],
            collective("all_reduce"),
            [call("all_reduce", 3, 10, reduction="SUM")],
            collective("all_reduce"),
        ),
        "reductions differ",
        (0,),
        ["rank 0 has MAX, the other 3 have SUM"],
    ),
    "roots": (
        diverged(
            [call("broadcast", 3, 10, root=1)],
            collective("broadcast"),
            [call("broadcast", 3, 10, root=0)],
            collective("broadcast"),
            2,
        ),
        "roots differ",
        (2,),
        ["rank 2 has root 1, the other 3 have root 0"],
    ),
    "left the loop for a barrier": (
        diverged(
            [*LOOP, call("barrier", 9)],
            collective("barrier", 70, **AFTER_LOOP),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 52, **IN_LOOP),
            1,
        ),
        "uneven data",
        (1,),
        ["rank 1 left the loop earlier", "barrier #9 at train.py:70", "all_reduce #9", "uneven data"],
    ),
    "left DDP's loop, seen through the function that both are in": (
        diverged(
            [*past(8, REDUCE), call("barrier", 9)],
            [*collective("barrier", 12, function="finish"), frame("train.py", 90, "main", source="finish()")],
            [*past(8, REDUCE), call("all_reduce", 9, 10)],
            [*backward(31), frame("train.py", 85, "main", loop=84, source="step(batch)")],
            1,
        ),
        "uneven data",
        (1,),
        ["rank 1 left the loop", "DDP"],
    ),
    "left a loop that lies in a function": (
        diverged(
            [*past(8, REDUCE), call("barrier", 9)],
            collective("barrier", 28, function="main", source="dist.barrier()"),
            [*past(8, REDUCE), call("all_reduce", 9, 10)],
            [
                *backward(23, function="fit", loop=21, source="loss.backward()"),
                frame("train.py", 27, "main", source="fit()"),
            ],
            1,
        ),
        "uneven data",
        (1,),
        ["rank 1 left the loop", "barrier #9 at train.py:28 in main"],
    ),
    "unused parameters": (
        diverged(
            [*BUCKETS, call("all_reduce", 9, 100, done=True, site=tuple(backward())), call("all_reduce", 10, 1)],
            collective("all_reduce", 64),
            [*BUCKETS, call("all_reduce", 9, 100, done=True, site=tuple(backward())), call("all_reduce", 10, 200)],
            backward(),
            2,
        ),
        "unused parameters",
        (2,),
        [
            "rank 2 did not reduce a DDP bucket",
            "all_reduce #10 (DDP",
            "train.py:60",
            "continued to all_reduce #10 at train.py:64",
        ],
    ),
    "evaluation on one rank, which broadcasts twice": (
        diverged(
            [*LOOP, call("broadcast", 9, 3, done=True), call("broadcast", 10, 1)],
            [frame(DDP, 2405, "_sync_buffers"), frame(DDP, 1884, "forward"), frame("eval.py", 12, "evaluate")],
            [*LOOP, call("barrier", 9)],
            collective("barrier", 82),
        ),
        "evaluation",
        (0,),
        ["rank 0 alone runs the forward of a DDP model at eval.py:12 in evaluate", "(broadcast #9)"],
    ),
    "evaluation on one rank": (
        diverged(
            [*LOOP, call("broadcast", 9, 3)],
            [
                frame(DDP, 2427, "_sync_module_buffers"),
                frame(DDP, 2405, "_sync_buffers"),
                frame(DDP, 1884, "forward"),
                frame("eval.py", 12, "evaluate"),
                frame("train.py", 80, guard="if rank == 0"),
            ],
            [*LOOP, call("barrier", 9)],
            collective("barrier", 82),
        ),
        "evaluation",
        (0,),
        ["rank 0 alone runs the forward of a DDP model", "`if rank == 0`", "barrier #9 at train.py:82"],
    ),
}


@pytest.mark.parametrize("case", DESYNC)
def test_named_right(case: str) -> None:
    verdict = named_right(DESYNC[case])
    assert verdict.certain
