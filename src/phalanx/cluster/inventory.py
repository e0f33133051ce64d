"""What accelerators there are on this machine, and which of them a process started here would be let see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.cluster.cluster import Device


@dataclass(frozen=True)
class Slice(Device):
    """A MIG slice; `alias` is the name that drivers before R470 gave it, which CUDA still takes."""

    alias: str = ""  # MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>


@dataclass(frozen=True)
class Inventory:
    """The driver's list, what CUDA_VISIBLE_DEVICES leaves of it, and what is on the PCI bus in any case.

    A GPU that is cut into MIG slices stands in `driver` before its slices, with an empty handle: no process
    can have the whole of it.
    """

    driver: tuple[Device, ...] = ()
    visible: tuple[Device, ...] = ()
    mask: str | None = None  # CUDA_VISIBLE_DEVICES
    bus: tuple[str, ...] = ()  # PCI addresses of the NVIDIA GPUs that are there, and in no other driver's hands
    silent: tuple[str, ...] = ()  # those of them that no longer answer: they fell off the bus
    trouble: str = ""  # why the driver could not be asked; empty where there is none to ask

    @property
    def gone(self) -> tuple[str, ...]:
        """On the bus, but not in the driver's list. Says nothing where the driver did not answer."""
        listed = {device.bus for device in self.driver}
        return tuple(address for address in self.bus if self.driver and address not in listed)

    @property
    def hidden(self) -> tuple[Device, ...]:
        """What a process could use if CUDA_VISIBLE_DEVICES were not set."""
        seen = {device.uuid for device in self.visible}
        return tuple(device for device in apply_mask(self.driver, None) if device.uuid not in seen)

    @property
    def refused(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES was set in order to hide every GPU, rather than by mistake."""
        return self.mask is not None and self.mask.strip() in ("", "-1", "NoDevFiles")


def apply_mask(devices: Sequence[Device], mask: str | None) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES=mask leaves, in its order; the rules are CUDA's own.

    - Not set: all of them. A GPU cut into MIG slices counts as its slices.
    - The first entry says what the entries are: numbers, GPU UUIDs or MIG UUIDs; a unique beginning will do.
    - The list ends before the first entry that names nothing, or is of another kind.
    - A device named twice before that leaves no device at all.

    Numbers count in the order of the PCI bus, as nvidia-smi does. CUDA does so too if CUDA_DEVICE_ORDER is
    PCI_BUS_ID, or if all GPUs are of one model; else it puts the fastest first, and only CUDA knows which one
    that is. A GPU taken by number therefore keeps that number as its handle: the right one whatever the
    order, though its name and UUID here may then be another's.

    One process sees one MIG slice, the first of the list. Each worker has a list of its own, so all of them
    count here, as schedulers mean it; a sliced GPU named as a whole is its first slice, as it is for CUDA.
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


def match_uuid(devices: Sequence[Device], text: str) -> Device | None:
    """The only device that `text` names: a UUID or the beginning of one, or the old name of a MIG slice."""
    for device in devices:
        if text == device.uuid or (isinstance(device, Slice) and text == device.alias):
            return device
    digits = _digits(text)
    found = [device for device in devices if device.uuid[:4] == text[:4] and _digits(device.uuid).startswith(digits)]
    return found[0] if digits and len(found) == 1 else None


def _digits(uuid: str) -> str:
    """The digits after GPU- or MIG-, as CUDA reads them: dashes anywhere, and anything after the last of 32."""
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
