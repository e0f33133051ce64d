"""What will run: a value that is complete before anything starts, and can be printed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.cluster.placement import Placement, Seat
from phalanx.contract.variables import Membership, worker_environment
from phalanx.launch.command import Command
from phalanx.launch.filters import Std


@dataclass(frozen=True)
class Showing:
    """What of the workers' output is shown, and how."""

    shown: Mapping[int, Std]  # by rank
    prefixes: Mapping[int, str] = field(default_factory=dict)  # torchrun's template, filled; empty: ours
    stdout_needles: tuple[str, ...] = ()
    stderr_needles: tuple[str, ...] = ()
    duplicated: Mapping[int, Std] = field(default_factory=dict)
    colour: bool | None = None
    quiet: bool = False
    events: bool = False  # torchrun's --event-log-handler console


@dataclass(frozen=True)
class Ending:
    """How workers are brought to an end."""

    signals: tuple[signal.Signals, ...]
    grace: float = 30.0  # from a stop to SIGKILL
    failure_grace: float = 5.0  # the same, when a rank has failed and the others cannot go on


@dataclass(frozen=True)
class Start:
    """How processes are made."""

    fresh: bool
    preload: tuple[str, ...] = ()
    warm: bool = True
    keep_warm: float = 0.0


@dataclass(frozen=True)
class Plan:
    run_id: str
    command: Command
    placement: Placement
    node: int
    nodes: int
    environ: Mapping[str, str]  # what every worker inherits
    devices_isolated: bool
    virtual_local_rank: bool
    role: str
    master_addr: str
    master_port: int  # 0: any free one
    max_restarts: int
    stdin_rank: int | None
    log_dir: str | None
    showing: Showing
    ending: Ending
    start: Start
    notes: tuple[str, ...] = ()

    @property
    def seats(self) -> tuple[Seat, ...]:
        return self.placement.on(self.node)

    def environment(self, seat: Seat, *, attempt: int, folder: str, rank_folder: str, port: int) -> dict[str, str]:
        """Everything in one worker's environment."""
        member = Membership(
            rank=seat.rank,
            world_size=self.placement.world_size,
            local_rank=0 if self.virtual_local_rank else seat.local_rank,
            local_world_size=seat.local_world_size,
            node=self.node,
            nodes=self.nodes,
            role=self.role,
            run_id=self.run_id,
            run_folder=folder,
            master_addr=self.master_addr,
            master_port=port,
            attempt=attempt,
            max_restarts=self.max_restarts,
            error_file=f"{rank_folder}/error.json",
            signals=",".join(number.name for number in self.ending.signals),
        )
        devices = {}
        if self.devices_isolated or self.virtual_local_rank:
            devices["CUDA_VISIBLE_DEVICES"] = self._only_device(seat)
        return {**self.environ, **worker_environment(member, self.environ), **devices}

    def _only_device(self, seat: Seat) -> str:
        if seat.slot.device is not None:
            return seat.slot.device.handle
        if not self.virtual_local_rank:
            return ""
        # torchrun's --virtual-local-rank counts devices without asking whether they exist.
        visible = self.environ.get("CUDA_VISIBLE_DEVICES")
        return str(seat.local_rank) if visible is None else visible.split(",")[seat.local_rank].strip()
