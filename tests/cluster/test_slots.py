"""choose: how many workers, and on which devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.cluster import Device, Slot
from phalanx.cluster.inventory import Inventory, apply_mask
from phalanx.cluster.slots import choose
from phalanx.errors import DeviceError

GPUS = tuple(
    Device(
        "gpu",
        n,
        str(n),
        f"GPU-{n}{n}{n}{n}0000-0000-0000-0000-000000000000",
        "NVIDIA H200",
        f"0000:0{n}:00.0",
    )
    for n in range(8)
)
SLICED = (
    Device("gpu", 0, "", "GPU-aa", "NVIDIA H200", "0000:00:00.0"),
    Device("mig", 0, "MIG-1", "MIG-1", "NVIDIA H200 MIG 1g.18gb", "0000:00:00.0"),
    Device("mig", 0, "MIG-2", "MIG-2", "NVIDIA H200 MIG 1g.18gb", "0000:00:00.0"),
)
NOTHING = Inventory()


def machine(gpus: int = 8, mask: str | None = None) -> Inventory:
    driver = GPUS[:gpus]
    return Inventory(driver, apply_mask(driver, mask), mask, tuple(device.bus for device in GPUS[:gpus]))


def handles(slots: tuple[Slot, ...]) -> list[str | None]:
    return [slot.device.handle if slot.device else None for slot in slots]


CHOICES = [
    (NOTHING, None, None, False, [None]),
    (NOTHING, 3, None, False, [None] * 3),
    (NOTHING, 3, None, True, [None] * 3),
    (machine(2), None, None, False, ["0", "1"]),
    (machine(8), 2, None, False, ["0", "1"]),
    (machine(2), None, None, True, [None]),
    (machine(2), 4, None, True, [None] * 4),
    (machine(8, mask="6,3"), None, None, False, ["6", "3"]),
    (machine(8, mask="6,3"), 1, None, False, ["6"]),
    (machine(8, mask=""), None, None, False, [None]),  # hidden on purpose: CPU work on a machine with GPUs
    (machine(8, mask="-1"), 4, None, False, [None] * 4),
    (machine(8, mask="NoDevFiles"), 4, None, False, [None] * 4),
    (Inventory(mask="", trouble="version mismatch"), 2, None, False, [None] * 2),
    (machine(8), None, "0,2,5", False, ["0", "2", "5"]),
    (machine(8), None, "5-7, 0", False, ["5", "6", "7", "0"]),
    (machine(8), None, "3-3", False, ["3"]),
    (machine(8), 2, "4,1", False, ["4", "1"]),
    (machine(8, mask="6,3"), None, "1", False, ["3"]),
    (machine(8), None, "GPU-5,GPU-11110000-0000-0000-0000-000000000000", False, ["5", "1"]),
    (Inventory(SLICED, SLICED[1:]), None, None, False, ["MIG-1", "MIG-2"]),
    (Inventory(SLICED, SLICED[1:]), None, "1", False, ["MIG-2"]),
    (Inventory(SLICED, SLICED[1:]), None, "MIG-2", False, ["MIG-2"]),
]


@pytest.mark.parametrize(("inventory", "asked", "devices", "cpu", "expected"), CHOICES)
def test_slots(
    inventory: Inventory, asked: int | None, devices: str | None, cpu: bool, expected: list[str | None]
) -> None:
    assert handles(choose(inventory, asked=asked, devices=devices, cpu=cpu)) == expected


def refusal(
    inventory: Inventory, asked: int | None = None, devices: str | None = None, cpu: bool = False
) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        choose(inventory, asked=asked, devices=devices, cpu=cpu)
    return caught.value


def test_too_many_workers_for_a_machine_that_lost_a_gpu_and_hides_another() -> None:
    driver = GPUS[:3]
    inventory = Inventory(
        driver,
        apply_mask(driver, "0,1"),
        "0,1",
        bus=tuple(device.bus for device in GPUS[:5]),
        silent=(GPUS[4].bus,),
    )
    assert str(refusal(inventory, asked=4)) == "\n".join(
        [
            "4 workers were asked for, but 2 GPUs can be used here.",
            f"  the driver lists gpu 0: NVIDIA H200 {GPUS[0].uuid} (--devices 0)",
            f"  the driver lists gpu 1: NVIDIA H200 {GPUS[1].uuid} (--devices 1)",
            f"  the driver lists gpu 2: NVIDIA H200 {GPUS[2].uuid}",
            "  CUDA_VISIBLE_DEVICES=0,1 hides gpu 2",
            "  on the PCI bus at 0000:03:00.0, but not listed by the driver: "
            "a container or a scheduler keeps it from this process, or it is broken",
            "  on the PCI bus at 0000:04:00.0, but not listed by the driver: "
            "it no longer answers: it fell off the bus (a reset or a reboot may bring it back)",
            "  fix: phalanx run -g 2 …   (or --share-gpu for 4 ranks on them, or --cpu for 4 CPU ranks)",
        ]
    )


def test_what_the_mask_hides_is_offered_if_it_would_be_enough() -> None:
    fix = refusal(machine(8, mask="0,1"), asked=8).fix
    assert fix.startswith(
        "phalanx run -g 2 …   (or --share-gpu for 8 ranks on them, or --cpu for 8 CPU ranks, "
        "or unset CUDA_VISIBLE_DEVICES; "
    )
    assert fix.endswith("phalanx run -g 8 …)")
    assert "unset" not in refusal(machine(8, mask="0,1"), asked=9).fix


def test_a_mask_that_leaves_nothing_by_mistake_does_not_start_cpu_workers() -> None:
    error = refusal(machine(2, mask="2"))
    assert error.what == "no GPU can be used here, though the driver lists 2 GPUs."
    assert "CUDA_VISIBLE_DEVICES=2 hides gpu 0, gpu 1" in error.details
    assert error.fix == "unset CUDA_VISIBLE_DEVICES; phalanx run -g 2 …, or phalanx run --cpu -g 1 … for CPU ranks"


def test_a_driver_that_does_not_answer_does_not_start_cpu_workers() -> None:
    error = refusal(Inventory(bus=(GPUS[0].bus,), trouble="the NVIDIA driver does not answer: mismatch"), asked=2)
    assert error.details == (
        "the driver lists no GPU",
        "on the PCI bus: 0000:00:00.0",
        "the NVIDIA driver does not answer: mismatch",
    )
    assert error.fix == "phalanx run --cpu -g 2 … for CPU ranks"


def test_a_gpu_set_for_slices_without_any_is_explained() -> None:
    error = refusal(Inventory(SLICED[:1], ()))
    assert error.details == ("the driver lists gpu 0: NVIDIA H200 GPU-aa (MIG is on, with no slices)",)


def test_slices_are_counted_as_slices() -> None:
    error = refusal(Inventory(SLICED, SLICED[1:]), asked=3)
    assert error.what == "3 workers were asked for, but 2 MIG slices can be used here."


BAD = [
    ("", "--devices '' cannot be had: it is empty."),
    ("0,,1", "--devices 0,,1 cannot be had: it has an empty entry."),
    ("one", "--devices one cannot be had: “one” is not a number, range or UUID."),
    ("-1", "--devices -1 cannot be had: “-1” is not a number, range or UUID."),
    ("0:2", "--devices 0:2 cannot be had: “0:2” is not a number, range or UUID."),
    ("4", "--devices 4 cannot be had: there is no device 4."),
    ("2-9", "--devices 2-9 cannot be had: there is no device 4."),
    ("7-9", "--devices 7-9 cannot be had: there is no device 7."),
    ("2-0", "--devices 2-0 cannot be had: the range 2-0 runs backwards."),
    ("1,1", f"--devices 1,1 cannot be had: it names NVIDIA H200 {GPUS[1].uuid} twice."),
    ("0-2,1", f"--devices 0-2,1 cannot be had: it names NVIDIA H200 {GPUS[1].uuid} twice."),
    ("1,GPU-1", f"--devices 1,GPU-1 cannot be had: it names NVIDIA H200 {GPUS[1].uuid} twice."),
    ("GPU-f", "--devices GPU-f cannot be had: no UUID here, or more than one, begins with GPU-f."),
]


@pytest.mark.parametrize(("text", "what"), BAD)
def test_missing_devices_are_refused_with_a_fix(text: str, what: str) -> None:
    error = refusal(machine(4), devices=text)
    assert error.what == what
    assert error.fix == "phalanx run --devices 0-3 …"
    assert len(error.details) == 4


def test_devices_and_another_number_of_workers() -> None:
    error = refusal(machine(4), asked=4, devices="0,2")
    assert error.what == "4 workers were asked for, but --devices 0,2 names 2 GPUs."
    assert error.fix.startswith("phalanx run --devices 0,2 …")


def test_devices_where_there_are_none() -> None:
    error = refusal(NOTHING, devices="0")
    assert error.what == "--devices 0 cannot be had: no GPU can be used here."
    assert error.fix == "phalanx run --cpu …   (CPU ranks)"


def test_devices_for_cpu_workers() -> None:
    assert "--cpu and --devices 0 contradict" in refusal(machine(4), devices="0", cpu=True).what


@pytest.mark.parametrize("asked", [0, -2])
def test_fewer_than_one_worker(asked: int) -> None:
    assert refusal(machine(4), asked=asked).what == f"{asked} workers were asked for; a node takes at least 1."
    assert refusal(NOTHING, asked=asked, cpu=True).fix == "phalanx run -g 1 …"


@given(st.integers(0, 8), st.one_of(st.none(), st.integers(1, 12)), st.booleans())
def test_as_many_slots_as_asked_or_a_refusal_that_works_when_typed(gpus: int, asked: int | None, cpu: bool) -> None:
    inventory = machine(gpus)
    if asked and asked > gpus > 0 and not cpu:
        assert f"-g {gpus} " in refusal(inventory, asked=asked).fix
        assert len(choose(inventory, asked=gpus, devices=None)) == gpus
        assert len(choose(inventory, asked=asked, devices=None, cpu=True)) == asked
        return
    slots = choose(inventory, asked=asked, devices=None, cpu=cpu)
    assert len(slots) == (asked or (1 if cpu else max(gpus, 1)))
    assert all((slot.device is None) == (cpu or not gpus) for slot in slots)
    assert len({slot.device for slot in slots if slot.device}) in (0, len(slots))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
def test_any_list_of_numbers_gives_those_devices(numbers: list[int]) -> None:
    text = ",".join(str(number) for number in numbers)
    assert handles(choose(machine(8), asked=None, devices=text)) == [str(number) for number in numbers]


@given(st.text(alphabet="0123456789,- GPUMIG:x", max_size=12))
def test_any_text_gives_slots_of_distinct_devices_or_a_fix(text: str) -> None:
    outcome: tuple[Slot, ...] | DeviceError
    try:
        outcome = choose(machine(8), asked=None, devices=text)
    except DeviceError as error:
        outcome = error
    if isinstance(outcome, DeviceError):
        assert outcome.fix == "phalanx run --devices 0-7 …"
    else:
        assert len(set(handles(outcome))) == len(outcome) >= 1
