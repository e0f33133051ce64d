"""warnings: GPUs that are lost, hidden or do not exist. The inventories are invented, because there is no GPU here.

`test_nvidia.py` shows that a fake NVML and a fake /sys give such inventories.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from phalanx.cluster.cluster import Device
from phalanx.cluster.inventory import Inventory, apply_mask, unmatched
from phalanx.cluster.missing_devices import warnings
from tests.kit.cli import free_port, phalanx, start

GPUS = tuple(Device("gpu", n, str(n), f"GPU-{n}", "NVIDIA H200", f"0000:0{n}:00.0") for n in range(8))
BUS = tuple(device.bus for device in GPUS)


def machine(
    driver: tuple[Device, ...] = GPUS,
    mask: str | None = None,
    *,
    bus: tuple[str, ...] = BUS,
    silent: tuple[str, ...] = (),
    trouble: str = "",
    confined: bool = False,
    other_vendor: bool = False,
) -> Inventory:
    return Inventory(
        driver, apply_mask(driver, mask), mask, bus, silent, trouble, confined=confined, other_vendor=other_vendor
    )


@pytest.mark.parametrize(
    "inventory",
    [
        Inventory(),
        machine(),
        machine(mask="0,1"),
        machine(mask="0,1,-1"),
        machine(mask="0,1,"),
        machine(mask=""),
        machine(GPUS[:7], mask="", silent=BUS[7:]),  # the user wants no GPU
        machine(GPUS[:2], confined=True),  # the others belong to other jobs
        machine(silent=BUS[7:]),  # it sleeps, but the driver lists it
        machine((), bus=(), mask="-1"),
        machine((), bus=(), mask="0,1", other_vendor=True),
        machine((), bus=(), mask="0", trouble="the NVIDIA driver does not answer"),  # an error says so
    ],
)
def test_without_missing_devices_there_are_no_warnings(inventory: Inventory) -> None:
    assert warnings(inventory) == ()


def test_a_gpu_that_fell_off_the_bus() -> None:
    (text,) = warnings(machine(GPUS[:7], silent=BUS[7:]))
    assert text.split("\n  ") == [
        "1 of 8 GPUs fell off the PCI bus: 0000:07:00.0",
        "7 GPUs can be used",
        "fix: nvidia-smi --gpu-reset as root, or a reboot; phalanx run -g 8 … does not start with fewer GPUs than that",
    ]


def test_a_gpu_that_only_the_driver_calls_lost() -> None:
    trouble = "GPU 3 does not answer the driver: GPU is lost"
    (text,) = warnings(machine(GPUS[:3] + GPUS[4:], trouble=trouble))
    assert text.startswith(f"{trouble}\n  7 GPUs can be used\n  fix: ")
    (text,) = warnings(machine(GPUS[:3] + GPUS[4:], trouble=trouble, silent=BUS[3:4]))
    assert text.startswith(f"1 of 8 GPUs fell off the PCI bus: 0000:03:00.0\n  {trouble}\n  7 GPUs can be used")


def test_all_gpus_fell_off_the_bus() -> None:
    (text,) = warnings(machine((), bus=BUS[:2], silent=BUS[:2]))
    assert text.startswith("2 of 2 GPUs fell off the PCI bus: 0000:00:00.0, 0000:01:00.0\n  no GPU can be used")
    assert "phalanx run -g" not in text


def test_a_gpu_that_the_driver_does_not_list() -> None:
    (text,) = warnings(machine(GPUS[:7]))
    assert text.startswith("the driver does not list 1 of 8 GPUs on the PCI bus: 0000:07:00.0\n")
    assert "7 GPUs can be used" in text


@pytest.mark.parametrize(
    ("mask", "first", "kept"),
    [
        ("0,1,9", "CUDA_VISIBLE_DEVICES=0,1,9: there is no GPU 9", "0,1"),
        ("0,9,1", "CUDA_VISIBLE_DEVICES=0,9,1: there is no GPU 9", "0"),
        ("0,,1", "CUDA_VISIBLE_DEVICES=0,,1 has an empty entry", "0"),
        ("0,one", "CUDA_VISIBLE_DEVICES=0,one: there is no GPU one", "0"),
        ("GPU-0,GPU-99", "CUDA_VISIBLE_DEVICES=GPU-0,GPU-99: there is no GPU GPU-99", "GPU-0"),
    ],
)
def test_an_entry_of_the_mask_that_does_not_exist(mask: str, first: str, kept: str) -> None:
    (text,) = warnings(machine(mask=mask))
    lines = text.split("\n  ")
    assert lines[0] == first
    assert lines[1].startswith("the driver lists GPUs 0-7; CUDA ignores this entry and all that follow: ")
    assert lines[2] == f"fix: CUDA_VISIBLE_DEVICES={kept} phalanx run …"


def test_a_mask_on_a_machine_without_gpus() -> None:
    (text,) = warnings(machine((), bus=(), mask="0,1"))
    assert text.startswith("CUDA_VISIBLE_DEVICES=0,1 names GPUs, but no NVIDIA GPU can be used here")


def test_the_lost_gpu_and_the_wrong_mask_are_both_reported() -> None:
    assert len(warnings(machine(GPUS[:7], mask="0,7", silent=BUS[7:]))) == 2


def test_unmatched() -> None:
    assert unmatched(GPUS, "0,8") == "8"
    assert unmatched(GPUS, " 0, 1") is None
    assert unmatched((), "0") == "0"


FAKE = """
import sys
from phalanx.cli.main import main
from phalanx.cluster import nvidia
from phalanx.cluster.inventory import Inventory
nvidia.survey = lambda environ, root="/": Inventory(bus=("0000:3b:00.0",), silent=("0000:3b:00.0",))
sys.exit(main(sys.argv[1:]))
"""


def test_node_0_prints_what_every_node_lacks(tmp_path: Path) -> None:
    """A real run of two nodes. The driver of node 1 is fake; node 0 has a mask for GPUs that it does not have."""
    meeting = ("-n", "2", "--master", f"127.0.0.1:{free_port()}", "--no-auth", "--no-python", "true")
    words = (sys.executable, "-c", FAKE, "run", "-i", "1", *meeting)
    env = {"PHALANX_HOME": str(tmp_path / "one"), "CUDA_VISIBLE_DEVICES": None}
    with start(words=words, env=env):
        env = {"PHALANX_HOME": str(tmp_path / "zero"), "CUDA_VISIBLE_DEVICES": "3"}
        ended = phalanx("run", "-i", "0", *meeting, env=env, timeout=120)
    assert ended.code == 0, ended.err
    assert "phalanx: CUDA_VISIBLE_DEVICES=3 names GPUs, but no NVIDIA GPU can be used here" in ended.err
    assert re.search(r"phalanx: node 1 \(.*\): 1 of 1 GPUs fell off the PCI bus: 0000:3b:00.0\n", ended.err)
    (events,) = (tmp_path / "zero/runs").glob("*/events.jsonl")
    recorded = events.read_text()
    assert "names GPUs" in recorded
    assert "fell off the PCI bus" in recorded
