"""Checks of GPUs, from given facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.cluster import xids as kernel_xids
from phalanx.cluster.xids import XidLine
from phalanx.doctor.checks import gpus
from phalanx.doctor.gpu_facts import GpuFacts, GpuMemory, GpuPower, GpuProcess, Gpus
from tests.doctor.checks.expected import GIB, expect

GPU = GpuFacts(0, "H200", "", True, GpuPower(700, 700), GpuMemory(GIB, errors_now=0, errors_ever=0))
BUS = "0000:3b:00.0"
GOOD = Gpus((GPU,), (BUS,), driver="580.1", driver_cuda="13.0", torch_cuda="13.0")


def with_gpu(**changes: object) -> Gpus:
    return replace(GOOD, gpus=(replace(GPU, **changes),))  # type: ignore[arg-type]


def with_memory(**changes: object) -> Gpus:
    return with_gpu(memory=replace(GPU.memory, **changes))  # type: ignore[arg-type]


def with_power(**changes: object) -> Gpus:
    return with_gpu(power=replace(GPU.power, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Gpus(), "green", ["none"]),
        (GOOD, "green", ["1 H200; driver 580.1 (CUDA 13.0)"]),
        (replace(GOOD, topology="all pairs by NVLink", hidden=1), "green", ["1 hidden", "all pairs by NVLink"]),
        (
            replace(GOOD, gone=("x",), confined=True),
            "green",
            ["1 more on the PCI bus are not available"],
        ),
        (replace(GOOD, bus=(BUS, "x"), gone=("x",)), "yellow", ["the PCI bus has 2 GPUs, the driver lists 1"]),
        (replace(GOOD, bus=(BUS, "x"), gone=("x",), silent=("x",)), "red", ["no answer from 1 GPU", "fell off"]),
        (Gpus(bus=(BUS,)), "yellow", ["1 GPU on the PCI bus, and no NVIDIA driver"]),
        (Gpus(bus=(BUS,), silent=(BUS,)), "red", ["no answer from 1 GPU"]),
        (Gpus(bus=(BUS,), trouble="the NVIDIA driver does not answer: x"), "red", ["does not answer: x"]),
        (replace(GOOD, torch_cuda="14.1"), "red", ["built for CUDA 14.1", "13.0 at most"]),
        (replace(GOOD, driver_cuda="13.0", torch_cuda="13.2"), "green", []),
        (with_memory(errors_now=1), "red", ["GPU 0 had 1 memory error that"]),
        (with_memory(errors_ever=3), "yellow", ["3 memory errors", "in its life"]),
        (with_memory(errors_now=None, errors_ever=None), "green", []),
        (with_memory(pending=True), "yellow", ["waits for a reset"]),
        (with_memory(remap_failed=True), "red", ["could not replace"]),
        (with_gpu(persistence=False), "yellow", ["persistence mode is off for GPU 0"]),
        (with_gpu(persistence=None), "green", []),
        (with_power(limit=400), "yellow", ["GPU 0 may draw 400 W, less than 700 W"]),
        (with_power(slowed=("it is too hot", "it is too hot"), temperature=91), "yellow", ["at 91 °C: it is too hot"]),
        (with_gpu(processes=(GpuProcess(7, GIB, "eve", "python x"),)), "yellow", ["process 7 (eve, python x, 1 GiB)"]),
        (with_memory(used=3 * GIB), "yellow", ["3 GiB of GPU 0", "cannot be seen"]),
        (with_memory(used=GIB // 2), "green", []),
        (
            replace(GOOD, xids=(XidLine(79, "0000:3b:00", 60, ""),)),
            "red",
            ["Xid 79", "1 time, the last 1 min ago", "fell off"],
        ),
        (
            replace(GOOD, xids=(XidLine(48, "b", 9e5, ""), XidLine(48, "b", 8e4, ""))),
            "yellow",
            ["2 times, the last 22 h ago"],
        ),
        (replace(GOOD, xids=(XidLine(31, "b", 60, ""),)), "green", []),  # caused by a program
    ],
)
def test_gpus(facts: Gpus, level: str, words: list[str]) -> None:
    expect(gpus.judge(facts), level, *words)


def test_gpu_with_fewer_links_than_others() -> None:
    good, bad = replace(GPU, links=18), replace(GPU, index=1, links=17, links_down=1)
    expect(gpus.judge(replace(GOOD, gpus=(good, bad))), "yellow", "GPU 1 has 17 NVLinks up, others have 18")
    alone = replace(GPU, links_down=18)  # a single card, which has no peer for its links
    expect(gpus.judge(replace(GOOD, gpus=(alone, replace(alone, index=1)))), "green")


def test_xids_are_found_in_the_log_of_the_kernel() -> None:
    lines = [
        "6,1,1000000,-;Linux version 6\n",
        "4,2,40000000,-;NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', GPU has fallen off the bus.\n SUBSYSTEM=x\n",
        "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception",
    ]
    assert [(xid.number, xid.bus, xid.age) for xid in kernel_xids.find_xids(lines, 100.0)] == [
        (79, "0000:3b:00", 60.0),
        (13, "0000:3b:00", 0.0),
    ]
