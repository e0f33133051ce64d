"""The plan of a run: complete before anything starts, and printed by `phalanx plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from phalanx.cluster import sharing
from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.contract.placement import RankPlacement
from phalanx.contract.variables import INTERFACES, WorkerVariables, worker_environment
from phalanx.launcher.command import Command
from phalanx.launcher.coordination.rendezvous_config import RendezvousConfig
from phalanx.launcher.options import (
    HangOptions,
    OutputOptions,
    RecoveryOptions,
    ShutdownOptions,
    StartOptions,
    ViewerOptions,
)


@dataclass(frozen=True)
class Plan:
    """What one node runs: the command, the environment of each worker, and how the run starts and ends."""

    run_id: str
    command: Command
    seats: tuple[Seat, ...]  # the ranks of this node; at least one
    environ: Mapping[str, str]  # inherited by every worker
    devices_isolated: bool
    virtual_local_rank: bool
    role: str
    master_addr: str
    master_port: int  # 0: a free port
    stdin_rank: int | None
    start: StartOptions
    recovery: RecoveryOptions
    hang: HangOptions
    shutdown: ShutdownOptions
    output: OutputOptions
    viewers: ViewerOptions
    notes: tuple[str, ...] = ()
    topology: str = ""
    rendezvous: RendezvousConfig | None = None  # None: one node
    spares: int = 0  # spare workers on this node
    spare: bool = False  # the whole node is a spare
    unused: tuple[Slot, ...] = ()  # devices of this node that no rank uses

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

    def line_prefix(self, seat: Seat, host: str) -> str | None:
        """Return the prefix of a rank's output lines. None: phalanx's own."""
        return self.output.prefix(seat, host, self.role)

    def environment(
        self, seat: Seat, *, attempt: int, run: str, folder: str, rank_folder: str, port: int, line: str, memory: str
    ) -> dict[str, str]:
        """Return the whole environment of one worker."""
        member = WorkerVariables(
            placement=self.worker_placement(seat),
            role=self.role,
            run_id=self.run_id,
            run=run,
            run_folder=folder,
            address=self.master_addr,
            port=port,
            attempt=attempt,
            max_restarts=self.recovery.max_restarts,
            error_file=f"{rank_folder}/error.json",
            signals=",".join(number.name for number in self.shutdown.signals),
            topology=self.topology,
            line=line,
            memory=memory,
        )
        devices = self.devices(seat)
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        shared = sharing.for_one(seat, self.seats, run=run, nodes=self.node_count)
        return {**shared, **self.environ, **worker_environment(member, self.environ), **own}

    def worker_placement(self, seat: Seat) -> RankPlacement:
        """Return the placement that a worker sees: with `virtual_local_rank`, every local rank is 0."""
        return msgspec.structs.replace(seat.placement, local_rank=0) if self.virtual_local_rank else seat.placement

    def devices(self, seat: Seat) -> str | None:
        """Return the CUDA_VISIBLE_DEVICES of one worker. None: the same as all workers have."""
        return self._only_device(seat) if self.devices_isolated or self.virtual_local_rank else None

    def seated(
        self,
        seats: Sequence[Seat],
        *,
        topology: str,
        master: tuple[str, int],
        interface: str | None,
        spare: bool = False,
    ) -> Plan:
        """Return the plan with the ranks that this node got once all nodes have joined."""
        own = {}
        if interface is not None:
            own = {name: form.format(interface) for name, form in INTERFACES.items() if name not in self.environ}
        # With several tasks on this node and one device each, the device is number 0 in every task.
        alone = (
            len(self.seats) == 1 and self.seats[0].slot.device is not None and seats[0].placement.local_world_size > 1
        )
        return replace(
            self,
            seats=tuple(seats),
            topology=topology,
            master_addr=master[0],
            master_port=master[1],
            environ={**self.environ, **own},
            virtual_local_rank=self.virtual_local_rank or alone,
            spare=spare,
        )

    def _only_device(self, seat: Seat) -> str:
        if seat.slot.device is not None:
            return seat.slot.device.handle
        if not self.virtual_local_rank:
            return ""
        # torchrun's --virtual-local-rank does not check whether the device exists; neither does this.
        visible = self.environ.get("CUDA_VISIBLE_DEVICES")
        return str(seat.local_rank) if visible is None else visible.split(",")[seat.local_rank].strip()
