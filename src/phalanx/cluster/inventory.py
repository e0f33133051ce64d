"""The accelerators of this host, and which of them a process that is started here sees. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.cluster.cluster import Device


@dataclass(frozen=True)
class Slice(Device):
    """A MIG slice. `alias`: its name in drivers before R470, which CUDA still accepts."""

    alias: str = ""  # MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>


@dataclass(frozen=True)
class Inventory:
    """The devices that the driver lists, those that CUDA_VISIBLE_DEVICES selects, and those on the PCI bus.

    A GPU with MIG slices is in `driver` before its slices, with an empty handle: no process can use all of it.
    """

    driver: tuple[Device, ...] = ()
    visible: tuple[Device, ...] = ()
    mask: str | None = None  # CUDA_VISIBLE_DEVICES
    bus: tuple[str, ...] = ()  # PCI addresses of NVIDIA GPUs that no other driver uses
    silent: tuple[str, ...] = ()  # those that no longer respond: they fell off the bus
    trouble: str = ""  # why the driver, or one GPU, could not be queried; empty if there is no driver
    confined: bool = False  # a container or a scheduler may hide GPUs from this process
    other_vendor: bool = False  # there are AMD GPUs, for which CUDA_VISIBLE_DEVICES works too

    @property
    def gone(self) -> tuple[str, ...]:
        """GPUs on the bus that the driver does not list. Empty if the driver could not be queried."""
        listed = {device.bus for device in self.driver}
        return tuple(address for address in self.bus if self.driver and address not in listed)

    @property
    def hidden(self) -> tuple[Device, ...]:
        """Devices that CUDA_VISIBLE_DEVICES hides."""
        seen = {device.uuid for device in self.visible}
        return tuple(device for device in apply_mask(self.driver, None) if device.uuid not in seen)

    @property
    def refused(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose."""
        return self.mask is not None and self.mask.strip() in ("", "-1", "NoDevFiles")


def apply_mask(devices: Sequence[Device], mask: str | None) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES=mask selects, in its order, by the rules of CUDA.

    - Not set: all devices. A GPU with MIG slices counts as its slices.
    - The first entry determines the kind of all entries: numbers, GPU UUIDs or MIG UUIDs. A unique prefix is enough.
    - The list ends before the first entry that matches no device, or is of another kind.
    - If a device occurs twice before that, no device is selected.

    Numbers follow the order of the PCI bus, as in nvidia-smi. CUDA uses the same order if CUDA_DEVICE_ORDER is
    PCI_BUS_ID, or if all GPUs are the same model. Otherwise it puts the fastest GPU first, and only CUDA knows which
    one that is. So a GPU that is selected by number keeps this number as its handle: it is right in any order, although
    its name and UUID here may be those of another GPU.

    A process sees only one MIG slice, the first of the list. Each worker gets its own list, so all slices count here,
    as schedulers intend. A GPU with slices that is selected as a whole means its first slice, as for CUDA.
    """
    if mask is None:
        return tuple(device for device in devices if device.handle)
    entries = mask.split(",")
    kind = _kind(entries[0])
    chosen: list[Device] = []
    for entry in entries:
        device = _find(devices, entry, kind)
        if device is None:
            break
        if any(device.uuid == other.uuid for other in chosen):
            return ()
        chosen.append(device)
    return tuple(chosen)


def unmatched(devices: Sequence[Device], mask: str) -> str | None:
    """Return the entry of CUDA_VISIBLE_DEVICES=mask that matches no device and ends the list, or None.

    -1 and an empty entry at the end are no mistake: they are how lists are ended on purpose.
    """
    entries = mask.split(",")
    kind = _kind(entries[0])
    for place, entry in enumerate(entries):
        if _find(devices, entry, kind) is None:
            meant = entry.strip() == "-1" or (not entry.strip() and place == len(entries) - 1)
            return None if meant else entry.strip()
    return None


def match_uuid(devices: Sequence[Device], text: str) -> Device | None:
    """Return the only device with this UUID, UUID prefix, or old name of a MIG slice."""
    for device in devices:
        if text == device.uuid or (isinstance(device, Slice) and text == device.alias):
            return device
    digits = _digits(text)
    found = [device for device in devices if device.uuid[:4] == text[:4] and _digits(device.uuid).startswith(digits)]
    return found[0] if digits and len(found) == 1 else None


def _digits(uuid: str) -> str:
    """Return the digits after GPU- or MIG-. Like CUDA, ignore dashes and everything after 32 digits."""
    digits = uuid[4:].replace("-", "")[:32].lower()
    return digits if set(digits) <= set("0123456789abcdef") else ""


def _kind(entry: str) -> str:
    return next((prefix for prefix in ("GPU-", "MIG-") if entry.startswith(prefix)), "number")


def _find(devices: Sequence[Device], entry: str, kind: str) -> Device | None:
    if kind == "MIG-":
        return match_uuid([device for device in devices if device.kind == "mig"], entry)
    whole = [device for device in devices if device.kind == "gpu"]
    if kind == "GPU-":
        named = match_uuid(whole, entry)
        return named and _usable(devices, named)
    # CUDA reads a number as strtol does (blanks and a sign before it, anything after it) and keeps 32 bits.
    read = re.match(r"\s*[+-]?\d+", entry, re.ASCII)
    number = int(read[0]) & 0xFFFFFFFF if read else len(whole)
    usable = _usable(devices, whole[number]) if number < len(whole) else None
    return replace(usable, handle=str(number)) if usable and usable.kind == "gpu" else usable


def _usable(devices: Sequence[Device], whole: Device) -> Device | None:
    if whole.handle:
        return whole
    return next((device for device in devices if device.kind == "mig" and device.index == whole.index), None)
