"""Chooses the number of workers on this host, and the device of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.cluster.cluster import Device, Slot
from phalanx.cluster.inventory import Inventory, match_uuid
from phalanx.errors import DeviceError


def choose(
    inventory: Inventory, *, asked: int | None, devices: str | None, cpu: bool = False, share: bool = False
) -> tuple[Slot, ...]:
    """Return one slot per worker, in the order of local ranks.

    asked    number of workers. Default: one per visible GPU; 1 without GPUs
    devices  value of --devices: `0,2,5`, `0-3`, UUIDs. Numbers as in `cuda:2` for a process that is started here
    cpu      workers without a device, even if there are GPUs
    share    allow more workers than devices: workers are assigned to devices in turn
    """
    if asked is not None and asked < 1:
        raise DeviceError(f"{asked} workers were asked for; a node takes at least 1.", fix="phalanx run -g 1 …")
    if cpu:
        return _cpu_slots(inventory, asked, devices)
    if devices is not None:
        named = _named(inventory, devices, None if share else asked)
        return tuple(Slot(named[place % len(named)]) for place in range(asked or len(named)))
    if not inventory.visible:
        _check_absence(inventory, asked)
        return (Slot(),) * (asked or 1)
    usable = len(inventory.visible)
    if asked is not None and asked > usable and not share:
        raise _too_few(inventory, asked)
    return tuple(Slot(inventory.visible[place % usable]) for place in range(asked or usable))


def _cpu_slots(inventory: Inventory, asked: int | None, devices: str | None) -> tuple[Slot, ...]:
    if devices is not None:
        raise DeviceError(
            f"--cpu and --devices {devices} contradict each other: a CPU worker has no device.",
            details=_facts(inventory),
            fix=f"phalanx run --devices {devices} …   (or --cpu alone)",
        )
    return (Slot(),) * (asked or 1)


def _check_absence(inventory: Inventory, asked: int | None) -> None:
    """Raise if the user probably does not expect CPU workers: there are GPUs, and the user did not hide them all."""
    if inventory.refused or not (inventory.driver or inventory.trouble):
        return
    whole = [device for device in inventory.driver if device.kind == "gpu"]
    seen = f"the driver lists {_count(whole)}" if whole else "there is an NVIDIA driver"
    ways = [f"phalanx run --cpu -g {asked or 1} … for CPU ranks"]
    if inventory.hidden:
        ways.insert(0, _unset(len(inventory.hidden), asked))
    raise DeviceError(
        f"no GPU can be used here, though {seen}.",
        details=_facts(inventory),
        fix=", or ".join(ways),
    )


def _too_few(inventory: Inventory, asked: int) -> DeviceError:
    usable = len(inventory.visible)
    ways = [f"--share-gpu for {asked} ranks on {'it' if usable == 1 else 'them'}", f"--cpu for {asked} CPU ranks"]
    if asked <= usable + len(inventory.hidden):
        ways.append(_unset(usable + len(inventory.hidden), asked))
    return DeviceError(
        f"{asked} workers were asked for, but {_count(inventory.visible)} can be used here.",
        details=_facts(inventory),
        fix=f"phalanx run -g {usable} …   (or {', or '.join(ways)})",
    )


def _named(inventory: Inventory, text: str, asked: int | None) -> list[Device]:
    """Return the devices of --devices, in its order."""
    if not inventory.visible:
        raise _refuse(inventory, text, "no GPU can be used here")
    chosen: list[Device] = []
    for entry in (part.strip() for part in text.split(",")):
        for device in _resolve(inventory, text, entry):
            if device in chosen:
                raise _refuse(inventory, text, f"it names {device.name} {device.uuid} twice")
            chosen.append(device)
    if asked is not None and asked != len(chosen):
        raise DeviceError(
            f"{asked} workers were asked for, but --devices {text} names {_count(chosen)}.",
            details=_facts(inventory),
            fix=f"phalanx run --devices {text} …   (without -g: one worker a device)",
        )
    return chosen


def _resolve(inventory: Inventory, text: str, entry: str) -> list[Device]:
    visible = inventory.visible
    if not entry:
        raise _refuse(inventory, text, "it has an empty entry" if text.strip() else "it is empty")
    if entry.startswith(("GPU-", "MIG-")):
        device = match_uuid(visible, entry)
        if device is None:
            raise _refuse(inventory, text, f"no UUID here, or more than one, begins with {entry}")
        return [device]
    span = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", entry, re.ASCII)
    if span is None:
        raise _refuse(inventory, text, f"“{entry}” is not a number, range or UUID")
    first, last = int(span[1]), int(span[2] or span[1])
    if last < first:
        raise _refuse(inventory, text, f"the range {entry} runs backwards")
    if last >= len(visible):
        raise _refuse(inventory, text, f"there is no device {max(first, len(visible))}")
    return list(visible[first : last + 1])


def _refuse(inventory: Inventory, text: str, why: str) -> DeviceError:
    usable = len(inventory.visible)
    example = "0" if usable == 1 else f"0-{usable - 1}"
    return DeviceError(
        f"--devices {text or repr(text)} cannot be had: {why}.",
        details=_facts(inventory),
        fix=f"phalanx run --devices {example} …" if usable else "phalanx run --cpu …   (CPU ranks)",
    )


def _facts(inventory: Inventory) -> list[str]:
    """Return the known facts about the GPUs of this host, one line per fact."""
    lines = [_describe(inventory, device) for device in inventory.driver]
    if not lines:
        lines.append("the driver lists no GPU")
    if inventory.mask is not None:
        hidden = ", ".join(str(device) for device in inventory.hidden) or "nothing"
        lines.append(f"CUDA_VISIBLE_DEVICES={inventory.mask or repr('')} hides {hidden}")
    for address in inventory.gone:
        why = (
            "it no longer answers: it fell off the bus (a reset or a reboot may bring it back)"
            if address in inventory.silent
            else "a container or a scheduler keeps it from this process, or it is broken"
        )
        lines.append(f"on the PCI bus at {address}, but not listed by the driver: {why}")
    if not inventory.driver and inventory.bus:
        lines.append(f"on the PCI bus: {', '.join(inventory.bus)}")
    if inventory.trouble:
        lines.append(inventory.trouble)
    return lines


def _describe(inventory: Inventory, device: Device) -> str:
    """Return e.g. `the driver lists gpu 3: NVIDIA H200 GPU-… (--devices 1)`."""
    seen = [other.uuid for other in inventory.visible]
    note = f" (--devices {seen.index(device.uuid)})" if device.uuid in seen else ""
    if not device.handle:
        slices = sum(other.kind == "mig" and other.index == device.index for other in inventory.driver)
        note = f" (MIG is on, with {slices or 'no'} slice{'' if slices == 1 else 's'})"
    return f"the driver lists {device.kind} {device.index}: {device.name} {device.uuid}{note}"


def _count(devices: Sequence[Device]) -> str:
    noun = "MIG slice" if devices and all(device.kind == "mig" for device in devices) else "GPU"
    if len({device.kind for device in devices}) > 1:
        noun = "device"
    return f"{len(devices) or 'no'} {noun}{'' if len(devices) == 1 else 's'}"


def _unset(usable: int, asked: int | None) -> str:
    return f"unset CUDA_VISIBLE_DEVICES; phalanx run -g {min(asked or usable, usable)} …"
