"""All checks of one machine: its facts in one piece, as they travel between nodes, and what they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.doctor import disk, firewall, gpus, limits, names, network, ports, sharedmemory, versions
from phalanx.doctor.disk import Disk
from phalanx.doctor.finding import Finding
from phalanx.doctor.firewall import Firewall
from phalanx.doctor.gpus import Gpus
from phalanx.doctor.limits import Limits
from phalanx.doctor.names import Names
from phalanx.doctor.network import Network
from phalanx.doctor.ports import Ports
from phalanx.doctor.sharedmemory import SharedMemory
from phalanx.doctor.versions import Versions


@dataclass(frozen=True)
class Machine:
    id: str  # the same for processes that share a kernel and a network
    names: Names
    network: Network
    versions: Versions
    limits: Limits
    shared_memory: SharedMemory
    disk: Disk
    ports: Ports
    firewall: Firewall
    gpus: Gpus


def read(environ: Mapping[str, str], folder: str) -> Machine:
    """`folder` is where runs are kept."""
    return Machine(
        id=network.machine_id(),
        names=names.read(),
        network=network.read(),
        versions=versions.read(),
        limits=limits.read(),
        shared_memory=sharedmemory.read(),
        disk=disk.read(folder),
        ports=ports.read(),
        firewall=firewall.read(),
        gpus=gpus.read(environ),
    )


def judge(machine: Machine, node: str = "") -> list[Finding]:
    found = [
        *versions.judge(machine.versions),
        *gpus.judge(machine.gpus),
        *names.judge(machine.names),
        *network.judge(machine.network),
        *ports.judge(machine.ports),
        *firewall.judge(machine.firewall),
        *limits.judge(machine.limits),
        *sharedmemory.judge(machine.shared_memory),
        *disk.judge(machine.disk),
    ]
    return [dataclasses.replace(finding, node=node) for finding in found] if node else found
