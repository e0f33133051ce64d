"""The nodes of a run and their slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator, or a slice of one.

    `handle` is the value of CUDA_VISIBLE_DEVICES for a process that sees only this device.
    """

    kind: str  # "gpu" or "mig"
    index: int  # the driver's number (nvidia-smi's), of the parent for a slice
    handle: str
    uuid: str
    name: str
    bus: str = ""  # PCI address, as in /sys/bus/pci/devices
    memory: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.handle}"


@dataclass(frozen=True)
class Slot:
    """Room for one worker. A CPU slot has no device."""

    device: Device | None = None
    cores: tuple[int, ...] = ()  # the cores the worker is bound to; empty: all


@dataclass(frozen=True)
class Node:
    """A node and its slots."""

    id: int
    name: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Cluster:
    """All nodes of a run."""

    nodes: tuple[Node, ...]
    here: int = 0  # the id of the node this process runs on

    @property
    def node(self) -> Node:
        """The node that this process runs on."""
        return self.nodes[self.here]
