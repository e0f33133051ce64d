"""A rank that waits for its GPU, one that keeps its GPU waiting, and what the driver reports about both."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from phalanx.diagnose.diagnosis import diagnose, remarks
from phalanx.diagnose.evidence import CallEvidence, Evidence, Gpu, Rank, Xid
from tests.diagnose.made_evidence import (
    HERE,
    ITEM,
    LIB,
    Case,
    call,
    evidence,
    frame,
    group,
    loading,
    named_right,
    process,
    rank,
)

SYNC = [frame(LIB + "torch/cuda/__init__.py", 1083, "synchronize"), frame("train.py", 33, source="synchronize()")]
READS = [frame("train.py", 34, source="total += loss.item()")]
SPINS = [frame("train.py", 40, "count", source="number += 1")]
FULL, IDLE = Gpu(index=1, use=1.0), Gpu(index=1, use=0.0)
SLICE = Gpu(index=0, use=-1.0, shared=True)


def nccl(number: int, stack: list[Any], calls: list[CallEvidence], **more: Any) -> Rank:
    newest = max(each.seq for each in calls)
    done = max((each.seq for each in calls if each.done), default=-1)
    more.setdefault("gpu", Gpu(index=number, use=1.0))
    groups = [group("0", range(4), newest, done, backend="nccl")]
    return rank(
        number, stack, calls, groups=groups, proc=more.pop("proc", process("R")), device=f"gpu {number}", **more
    )


def recorded(seq: int, *, done: bool = False, started: bool | None = None) -> CallEvidence:
    return call("all_reduce", seq, 1000, done=done, backend="nccl", started=started)


def waits(number: int, started: bool | None = None) -> Rank:
    """Return a rank in all_reduce #41 whose main thread is at the next line."""
    return nccl(number, READS, [recorded(40, done=True), recorded(41, started=started)])


def beside(odd: Rank, started: bool | None = None) -> Evidence:
    return evidence(*(odd if number == odd.rank else waits(number, started) for number in range(4)))


def behind(stack: list[Any], **more: Any) -> Evidence:
    """Return ranks of which rank 1 has not called the collective that the others wait in."""
    return beside(nccl(1, stack, [recorded(40, done=True)], **more))


KEPT: dict[str, Case] = {
    "a kernel that does not end, before the next collective is called": (
        behind(SYNC, gpu=FULL),
        "gpu",
        (1,),
        [
            "rank 1 waits for the GPU (GPU 1, 100% in use) at train.py:33: a kernel does not end",
            "the other 3 wait for it",
        ],
    ),
    "the same, by a number that is read": (
        behind(READS, gpu=FULL),
        "gpu",
        (1,),
        ["rank 1 waits for the GPU (GPU 1, 100% in use) at train.py:34: a kernel does not end"],
    ),
    "the same, on a slice whose use nobody knows": (
        behind(READS, gpu=SLICE),
        "gpu",
        (1,),
        ["rank 1 waits for the GPU (GPU 0) at train.py:34: a kernel does not end"],
    ),
    "the same, with no word from the driver": (
        behind(READS, gpu=None),
        "gpu",
        (1,),
        ["rank 1 waits for the GPU at train.py:34: a kernel does not end"],
    ),
    "a kernel that does not end, with the collective queued behind it": (
        beside(nccl(1, READS, [recorded(40, done=True), recorded(41, started=False)]), started=True),
        "gpu",
        (1,),
        [
            "rank 1 waits for the GPU (GPU 1, 100% in use) at train.py:34: a kernel does not end, and all_reduce #41",
            "behind it has not started; the other 3 wait for it in all_reduce #41",
        ],
    ),
    "the same, in a synchronize": (
        beside(nccl(1, SYNC, [recorded(40, done=True), recorded(41, started=False)], gpu=SLICE), started=True),
        "gpu",
        (1,),
        ["rank 1 waits for the GPU (GPU 0) at train.py:33: a kernel does not end, and all_reduce #41"],
    ),
    "all have started it": (
        evidence(*(waits(number, started=True) for number in range(4))),
        "network",
        (),
        ["all 4 ranks wait in the same collective, all_reduce #41"],
    ),
    "it is unknown which rank has started it": (
        evidence(*(waits(number) for number in range(4))),
        "network",
        (),
        ["all 4 ranks wait in the same collective, all_reduce #41"],
    ),
    "nobody has started it": (
        evidence(*(waits(number, started=False) for number in range(4))),
        "network",
        (),
        ["all 4 ranks wait in the same collective, all_reduce #41"],
    ),
    "a loop in Python, with an idle GPU": (
        behind(SPINS, gpu=IDLE),
        "loop",
        (1,),
        [
            "rank 1 computes on the CPU, or loops, while the GPU is idle (GPU 1, 0% in use) at train.py:40 in count",
            "the other 3 wait for it in all_reduce #41",
        ],
    ),
    "a loop in Python, on a slice": (
        behind(SPINS, gpu=SLICE),
        "loop",
        (1,),
        ["rank 1 loops, or computes for very long"],
    ),
    "a loop in Python, with a GPU that another rank uses": (
        behind(SPINS, gpu=Gpu(index=0, use=1.0, shared=True)),
        "loop",
        (1,),
        ["rank 1 loops, or computes for very long"],
    ),
    "data, with an idle GPU": (
        behind(loading(ITEM), gpu=IDLE, proc=process()),
        "data",
        (1,),
        ["rank 1 is in data loading, dataset.py:41 in __getitem__"],
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_named_right(case: str) -> None:
    assert not named_right(KEPT[case]).certain


def test_a_number_that_is_read_is_no_wait_for_a_gpu_without_one() -> None:
    cpu = replace(behind(READS).ranks[1], gpu=None, device="")
    assert [each.kind for each in diagnose(beside(cpu))] == ["loop"]


def test_an_idle_gpu_is_evidence_of_what_the_cpu_does() -> None:
    (verdict,) = diagnose(KEPT["data, with an idle GPU"][0])
    assert "its GPU is idle (GPU 1, 0% in use)" in verdict.details
    slow = replace(behind(SPINS, gpu=IDLE), waited=6.0)
    slow = replace(slow, ranks=tuple(replace(each, busy=each.rank == 1, since=6.0) for each in slow.ranks))
    assert remarks(slow) == [
        "rank 1 computes at train.py:40 in count, while its GPU is idle (GPU 1, 0% in use): slow, and not stuck; "
        "the other 3 wait for it in all_reduce #41 (4.0 KB) at train.py:34"
    ]


def test_who_cannot_know_says_what_would_tell() -> None:
    (untimed,) = diagnose(KEPT["it is unknown which rank has started it"][0])
    assert any("TORCH_NCCL_ENABLE_TIMING=1" in line for line in untimed.details)
    (timed,) = diagnose(KEPT["all have started it"][0])
    assert not any("TORCH_NCCL_ENABLE_TIMING" in line for line in timed.details)


def test_coalesced_collectives_of_one_number_are_no_difference() -> None:
    """NCCL implements an uneven all_gather as broadcasts. torch records all under one number, and never as done."""
    parts = [call("all_gather", 39, size, backend="nccl") for size in (1, 2, 3, 4)]
    ranks = [nccl(number, READS, [*parts, recorded(40, done=True), recorded(41)]) for number in (0, 2, 3)]
    (verdict,) = diagnose(evidence(ranks[0], nccl(1, SPINS, [*parts, recorded(40, done=True)]), *ranks[1:]))
    assert verdict.ranks == (1,)
    assert "differ" not in verdict.text


# -- reports of the driver

HEALTH: dict[str, tuple[Gpu, list[str]]] = {
    "nothing": (FULL, []),
    "Xid": (
        replace(FULL, xids=(Xid(13, 500.0, "Graphics Exception"), Xid(79, 12.0, "GPU has fallen off the bus."))),
        [
            "rank 1, GPU 1: Xid 79, 12 s ago: GPU has fallen off the bus.",
            "rank 1, GPU 1: Xid 13, 8 min ago: Graphics Exception",
        ],
    ),
    "Xids of programs": (
        replace(
            FULL,
            xids=(
                Xid(
                    43, 69.0, "pid=833, name=python, channel 0x0900001a"
                ),  # an error of another process, possibly of an earlier run
                Xid(43, 9.0, "pid=4000, name=python, channel 0x0900001a"),
                Xid(43, 9.0, "pid=4000, name=python, channel 0x0900001a"),
                Xid(79, 12.0, "pid=833, GPU has fallen off the bus."),
            ),
        ),
        [
            "rank 1, GPU 1: Xid 43, 9 s ago: pid=4000, name=python, channel 0x0900001a",
            "rank 1, GPU 1: Xid 79, 12 s ago: pid=833, GPU has fallen off the bus.",
        ],
    ),
    "ECC": (replace(FULL, ecc=2), ["rank 1, GPU 1: 2 uncorrectable memory errors (ECC) since the driver was loaded"]),
    "rows": (
        replace(FULL, remap_failed=True, remap_pending=True),
        [
            "rank 1, GPU 1: a memory row could not be remapped: the GPU has to be replaced",
            "rank 1, GPU 1: memory rows or pages wait to be replaced: the GPU needs a reset",
        ],
    ),
    "heat": (replace(FULL, throttled="thermal"), ["rank 1, GPU 1: slowed down: thermal throttling"]),
    "links": (
        replace(FULL, nvlink_down=1, nvlink_errors=7, pcie_replays=1200),
        [
            "rank 1, GPU 1: 1 NVLink down",
            "rank 1, GPU 1: 7 NVLink errors since the driver was loaded",
            "rank 1, GPU 1: 1200 PCIe replays since the driver was loaded",
        ],
    ),
    "a few replays": (replace(FULL, pcie_replays=3), []),
    "of a slice": (
        replace(SLICE, ecc=1),
        ["rank 1, GPU 0: 1 uncorrectable memory error (ECC) since the driver was loaded"],
    ),
}


@pytest.mark.parametrize("case", HEALTH)
def test_the_driver_supports_the_verdict_of_its_rank(case: str) -> None:
    card, lines = HEALTH[case]
    (verdict,) = diagnose(behind(SYNC, gpu=card))
    assert [line for line in verdict.details if line.startswith("rank ")] == lines


def test_a_fault_is_reported_wherever_the_verdict_points() -> None:
    """A verdict about all ranks has the lines of all GPUs; one about another rank has only hardware faults."""
    bad = replace(FULL, ecc=1, throttled="thermal")
    seen = evidence(*(replace(waits(number), gpu=bad if number == 1 else FULL) for number in range(4)))
    (network,) = diagnose(seen)
    assert [line for line in network.details if line.startswith("rank 1, GPU 1")] == [
        "rank 1, GPU 1: 1 uncorrectable memory error (ECC) since the driver was loaded",
        "rank 1, GPU 1: slowed down: thermal throttling",
    ]
    other = behind([HERE], gpu=None, proc=process())
    other = replace(other, ranks=tuple(replace(each, gpu=bad) if each.rank == 2 else each for each in other.ranks))
    (stands,) = diagnose(other)
    assert stands.ranks == (1,)
    assert [line for line in stands.details if line.startswith("rank 2")] == [
        "rank 2, GPU 1: 1 uncorrectable memory error (ECC) since the driver was loaded"
    ]
