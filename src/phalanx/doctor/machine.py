"""Runs all checks of one machine. Facts are sent between nodes; findings are derived from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.doctor import gpu_facts
from phalanx.doctor.checks import disk, firewall, gpus, limits, names, network, ports, shared_memory, versions
from phalanx.doctor.checks.disk import Disk
from phalanx.doctor.checks.firewall import Firewall
from phalanx.doctor.checks.limits import Limits
from phalanx.doctor.checks.names import Names
from phalanx.doctor.checks.network import Network
from phalanx.doctor.checks.ports import Ports
from phalanx.doctor.checks.shared_memory import SharedMemory
from phalanx.doctor.checks.versions import Versions
from phalanx.doctor.finding import Finding
from phalanx.doctor.gpu_facts import Gpus


@dataclass(frozen=True)
class MachineFacts:
    """All facts that the checks read on one machine."""

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


def read(environ: Mapping[str, str], folder: str) -> MachineFacts:
    """Read the facts of this machine. `folder`: the directory of runs."""
    return MachineFacts(
        id=network.machine_id(),
        names=names.read(),
        network=network.read(),
        versions=versions.read(),
        limits=limits.read(),
        shared_memory=shared_memory.read(),
        disk=disk.read(folder),
        ports=ports.read(),
        firewall=firewall.read(),
        gpus=gpu_facts.read(environ),
    )


def judge(machine: MachineFacts, node: str = "") -> list[Finding]:
    """Return the findings of all checks of one machine."""
    found = [
        *versions.judge(machine.versions),
        *gpus.judge(machine.gpus),
        *names.judge(machine.names),
        *network.judge(machine.network),
        *ports.judge(machine.ports),
        *firewall.judge(machine.firewall),
        *limits.judge(machine.limits),
        *shared_memory.judge(machine.shared_memory),
        *disk.judge(machine.disk),
    ]
    return [dataclasses.replace(finding, node=node) for finding in found] if node else found
