"""The plan of a run: complete before anything starts, and printed by `phalanx plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phalanx.cluster import sharing
from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.contract.hyperparameters import Hyperparameter
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.contract.variables import INTERFACES, WorkerVariables, worker_environment
from phalanx.launcher.command import Command
from phalanx.launcher.options import (
    HangOptions,
    OutputOptions,
    RecoveryOptions,
    ShutdownOptions,
    StartOptions,
    ViewerOptions,
)

if TYPE_CHECKING:  # imports before the start of the fork server delay it
    from phalanx.launcher.rendezvous_config import RendezvousConfig


@dataclass(frozen=True, kw_only=True)
class SpareWorkers:
    """The spare workers of this node, besides its ranks."""

    count: int = 0
    slots: tuple[Slot, ...] = ()  # devices of this node that no rank uses


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """The process group from the perspective of one node: its ranks and spares, the other nodes, and the store."""

    seats: tuple[Seat, ...]  # the ranks of this node, and where they run; at least one
    topology: str  # the ranks of all nodes, encoded
    master_addr: str
    master_port: int  # 0: a free port
    role: str  # torchrun's name for the workers
    spare: bool = False  # the whole node is a spare
    spares: SpareWorkers = SpareWorkers()

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.seats[0].placement.world_size

    @property
    def node_rank(self) -> int:
        """Return the number of this node."""
        return self.seats[0].placement.node_rank

    @property
    def node_count(self) -> int:
        """Return the number of nodes."""
        return self.seats[0].placement.node_count


@dataclass(frozen=True, kw_only=True)
class DeviceVisibility:
    """Which devices a worker sees."""

    isolated: bool  # only its own
    virtual_local_rank: bool  # only its own, as device 0, and LOCAL_RANK is 0

    def worker_placement(self, seat: Seat) -> RankPlacement:
        """Return the placement that a worker sees: with `virtual_local_rank`, every local rank is 0."""
        return replace(seat.placement, local_rank=0) if self.virtual_local_rank else seat.placement

    def visible(self, seat: Seat, environ: Mapping[str, str]) -> str | None:
        """Return the CUDA_VISIBLE_DEVICES of one worker. None: the same for all workers, in `environ`."""
        if not self.isolated and not self.virtual_local_rank:
            return None
        if seat.slot.device is not None:
            return seat.slot.device.handle
        if not self.virtual_local_rank:
            return ""
        # torchrun's --virtual-local-rank does not check whether the device exists; neither does this.
        inherited = environ.get("CUDA_VISIBLE_DEVICES")
        return str(seat.local_rank) if inherited is None else inherited.split(",")[seat.local_rank].strip()


@dataclass(frozen=True, kw_only=True)
class PlanRemarks:
    """What the user should know about a plan before it runs."""

    notes: tuple[str, ...] = ()  # about the options
    warnings: tuple[str, ...] = ()  # about this host; node 0 prints those of all nodes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one node runs: the command, the environment of each worker, and how the run starts and ends."""

    run_id: str  # TORCHELASTIC_RUN_ID
    command: Command
    environ: Mapping[str, str]  # inherited by every worker
    group: GroupLayout
    devices: DeviceVisibility
    stdin_rank: int | None
    start: StartOptions
    recovery: RecoveryOptions
    hang: HangOptions
    shutdown: ShutdownOptions
    output: OutputOptions
    viewers: ViewerOptions
    remarks: PlanRemarks
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)  # given with --param
    rendezvous: RendezvousConfig | None = None  # None: one node

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Return the ranks of this node, and where they run."""
        return self.group.seats

    def line_prefix(self, seat: Seat, host: str) -> str | None:
        """Return the prefix of a rank's output lines. None: phalanx's own."""
        return self.output.prefix(seat, host, self.group.role)

    def environment(
        self, seat: Seat, *, attempt: int, run: str, folder: str, rank_folder: str, port: int, line: str, memory: str
    ) -> dict[str, str]:
        """Return the whole environment of one worker."""
        group = self.group
        member = WorkerVariables(
            placement=self.devices.worker_placement(seat),
            role=group.role,
            run_id=self.run_id,
            run=run,
            run_folder=folder,
            address=group.master_addr,
            port=port,
            attempt=attempt,
            max_restarts=self.recovery.max_restarts,
            error_file=f"{rank_folder}/error.json",
            signals=",".join(number.name for number in self.shutdown.signals),
            topology=group.topology,
            line=line,
            memory=memory,
        )
        devices = self.devices.visible(seat, self.environ)
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        slots = [other.slot for other in self.seats] + [*group.spares.slots] * (group.spares.count > 0)
        worker = f"{run}/{attempt}/{os.path.basename(rank_folder)}"
        elastic = self.rendezvous is not None and self.rendezvous.elastic
        shared = sharing.for_one(slots, worker=worker, one_node=group.node_count == 1 and not elastic)
        return {**shared, **self.environ, **worker_environment(member, self.environ), **own}

    def seated(
        self,
        seats: Sequence[Seat],
        *,
        topology: str,
        master: tuple[str, int],
        interface: str | None,
        spare: bool = False,
    ) -> Plan:
        """Return the plan with the ranks that were assigned to this node when all nodes have joined."""
        own = {}
        if interface is not None:
            own = {name: form.format(interface) for name, form in INTERFACES.items() if name not in self.environ}
        # With several tasks on this node and one device each, the device is number 0 in every task.
        alone = (
            len(self.seats) == 1 and self.seats[0].slot.device is not None and seats[0].placement.local_world_size > 1
        )
        group = replace(
            self.group,
            seats=tuple(seats),
            topology=topology,
            master_addr=master[0],
            master_port=master[1],
            spare=spare,
        )
        devices = replace(self.devices, virtual_local_rank=self.devices.virtual_local_rank or alone)
        return replace(self, group=group, devices=devices, environ={**self.environ, **own})
