"""GPUs that a user expects and a run does not get: lost GPUs, and wrong entries of CUDA_VISIBLE_DEVICES. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.cluster.affinity import spell
from phalanx.cluster.inventory import Inventory, unmatched

_MOST_NAMED = 8  # PCI addresses in one line


def warnings(inventory: Inventory) -> tuple[str, ...]:
    """Return one text per problem. Lines after the first are details; the last one says what to type."""
    if inventory.refused:
        return ()
    return (*_lost(inventory), *_unlisted(inventory), *_misspelt(inventory))


def lost(inventory: Inventory) -> list[str]:
    """Return the PCI addresses of GPUs that do not respond and that the driver does not list."""
    return [address for address in inventory.silent if address in inventory.gone or not inventory.driver]


def unlisted(inventory: Inventory) -> list[str]:
    """Return the PCI addresses of GPUs that respond, but that the driver does not list."""
    return [address for address in inventory.gone if address not in inventory.silent]


def _lost(inventory: Inventory) -> Iterator[str]:
    found = lost(inventory)
    if not found and not (inventory.trouble and inventory.driver):
        return
    gone = f"{len(found)} of {len(inventory.bus)} GPUs fell off the PCI bus: {_listed(found)}" if found else ""
    what = gone or inventory.trouble
    fix = "nvidia-smi --gpu-reset as root, or a reboot"
    if inventory.visible and inventory.mask is None:
        every = max(len(inventory.bus), len(inventory.visible) + 1)
        fix += f"; phalanx run -g {every} … does not start with fewer GPUs than that"
    yield _text(what, inventory.trouble if gone else "", _left(inventory), f"fix: {fix}")


def _unlisted(inventory: Inventory) -> Iterator[str]:
    found = unlisted(inventory)
    if not found or inventory.confined or inventory.trouble:
        return
    yield _text(
        f"the driver does not list {len(found)} of {len(inventory.bus)} GPUs on the PCI bus: {_listed(found)}",
        f"it is broken, or hidden from this process by a container or a scheduler: {_left(inventory)}",
        "fix: nvidia-smi -L; dmesg | grep NVRM",
    )


def _misspelt(inventory: Inventory) -> Iterator[str]:
    mask = inventory.mask
    if mask is None or inventory.other_vendor:
        return
    shown = f"CUDA_VISIBLE_DEVICES={mask}"
    if not inventory.driver:
        if not inventory.trouble:
            yield _text(
                f"{shown} names GPUs, but no NVIDIA GPU can be used here: the ranks run on CPUs",
                "fix: unset CUDA_VISIBLE_DEVICES; or give the container its GPUs (docker run --gpus all …)",
            )
        return
    entry = unmatched(inventory.driver, mask)
    if entry is None or not inventory.visible:
        return
    kept = ",".join(mask.split(",")[: len(inventory.visible)])
    numbers = spell(device.index for device in inventory.driver if device.kind == "gpu")
    yield _text(
        f"{shown}: there is no GPU {entry}" if entry else f"{shown} has an empty entry",
        f"the driver lists {_gpus(numbers)}; CUDA ignores this entry and all that follow: {_left(inventory)}",
        f"fix: CUDA_VISIBLE_DEVICES={kept} phalanx run …",
    )


def _left(inventory: Inventory) -> str:
    count = len(inventory.visible)
    return f"{count} GPUs can be used" if count > 1 else f"{count or 'no'} GPU can be used"


def _gpus(numbers: str) -> str:
    return f"GPU{'' if numbers.isdigit() else 's'} {numbers}"


def _listed(addresses: Sequence[str]) -> str:
    more = len(addresses) - _MOST_NAMED
    return ", ".join(addresses[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _text(*lines: str) -> str:
    return "\n  ".join(filter(None, lines))
