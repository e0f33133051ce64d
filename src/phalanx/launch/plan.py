"""What will run: a value that is complete before anything starts, and can be printed."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Literal

from phalanx.cluster import sharing
from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Placement, Seat
from phalanx.contract.variables import INTERFACES, WorkerVariables, worker_environment
from phalanx.launch.command import Command
from phalanx.launch.coordination.rendezvous_config import RendezvousConfig
from phalanx.launch.output import filters
from phalanx.launch.output.filters import Choice, Std
from phalanx.recover.decision import RestartPolicy

TEE_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's


@dataclass(frozen=True)
class OutputOptions:
    """What of the workers' output is shown, and how."""

    redirects: Choice = field(default_factory=Choice)
    tee: Choice = field(default_factory=Choice)
    ranks: frozenset[int] | None = None
    local_ranks: frozenset[int] | None = None
    template: str | None = None  # torchrun's, for what stands before a line; None: ours
    role: str = "default"
    stdout_needles: tuple[str, ...] = ()
    stderr_needles: tuple[str, ...] = ()
    colour: bool | None = None
    quiet: bool = False
    paces: bool = False  # of all ranks at the end, whoever is slow
    events: bool = False  # torchrun's --event-log-handler console

    def shown(self, seat: Seat) -> Std:
        local = seat.local_rank
        return filters.shown(
            local,
            seat.rank,
            redirects=self.redirects.of(local),
            tee=self.tee.of(local),
            local_ranks=self.local_ranks,
            ranks=self.ranks,
        )

    def duplicated(self, seat: Seat) -> Std:
        return filters.duplicated(seat.local_rank, tee=self.tee.of(seat.local_rank), local_ranks=self.local_ranks)

    def apart(self, seat: Seat) -> bool:
        """Whether each stream of this worker has to have a file of its own: torchrun's --tee and --redirects."""
        local = seat.local_rank
        return bool(self.tee.of(local)[local] | self.redirects.of(local)[local])

    def prefix(self, seat: Seat, host: str) -> str | None:
        """What the user's template makes of it; torchrun's prefix for a rank with `--tee`; None: ours."""
        template = self.template
        if template is None and self.tee.of(seat.local_rank)[seat.local_rank]:
            template = TEE_PREFIX
        if template is None:
            return None
        return Template(template).safe_substitute(
            role_name=self.role, rank=seat.rank, local_rank=seat.local_rank, hostname=host
        )


@dataclass(frozen=True)
class ShutdownOptions:
    """How workers are brought to an end."""

    signals: tuple[signal.Signals, ...]
    grace: float = 30.0  # from a stop to SIGKILL
    failure_grace: float = 5.0  # the same, when a rank has failed and the others cannot go on
    preempt: tuple[signal.Signals, ...] = (signal.SIGTERM,)  # those that leave time for a checkpoint
    checkpoint_grace: float = 30.0  # how much
    # For processes that ranks left running after a successful run; None: leave them running. The default is enough to
    # upload 100 MB of logs at 10 Mbit/s.
    linger: float | None = 120.0


@dataclass(frozen=True)
class StartOptions:
    """How processes are made."""

    fresh: bool
    preload: tuple[str, ...] = ()
    warm: bool = True
    keep_warm: float = 0.0


@dataclass(frozen=True)
class HangOptions:
    """When a run that stands still is looked into, and what is done about whom that names."""

    after: float | None = 30.0  # seconds; None: never
    then: Literal["report", "kill", "stop"] = "report"


@dataclass(frozen=True)
class ViewerOptions:
    """How the run is shown beside its output."""

    screen: bool = False  # on this terminal
    page: bool | None = None  # in a browser; None: where somebody sits at a terminal, and there is one node
    at: str | None = None  # where the page listens: address, port, or both; None: nobody said


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
    restarts_told: bool  # by the user
    restart_window: float
    silence: float  # of a worker that can regroup: after so many seconds it is lost
    stdin_rank: int | None
    log_dir: str | None
    showing: OutputOptions
    ending: ShutdownOptions
    start: StartOptions
    notes: tuple[str, ...] = ()
    topology: str = ""
    gathering: RendezvousConfig | None = None  # None: one node, and nobody to meet
    check_collectives: bool = False  # before they are started
    hanging: HangOptions = HangOptions()
    watching: ViewerOptions = ViewerOptions()
    spares: int = 0  # workers of this node that wait for one to die
    spare: bool = False  # the whole node waits
    unused: tuple[Slot, ...] = ()  # devices of this node that no rank has

    @property
    def seats(self) -> tuple[Seat, ...]:
        return self.placement.on(self.node)

    @property
    def budget(self) -> RestartPolicy:
        return RestartPolicy(self.max_restarts if self.restarts_told else None, self.restart_window)

    def environment(
        self, seat: Seat, *, attempt: int, run: str, folder: str, rank_folder: str, port: int, line: str, memory: str
    ) -> dict[str, str]:
        """Everything in one worker's environment."""
        member = WorkerVariables(
            rank=seat.rank,
            world_size=self.placement.world_size,
            local_rank=0 if self.virtual_local_rank else seat.local_rank,
            local_world_size=seat.local_world_size,
            node=self.node,
            nodes=self.nodes,
            role=self.role,
            run_id=self.run_id,
            run=run,
            run_folder=folder,
            address=self.master_addr,
            port=port,
            attempt=attempt,
            max_restarts=self.max_restarts,
            error_file=f"{rank_folder}/error.json",
            signals=",".join(number.name for number in self.ending.signals),
            topology=self.topology,
            line=line,
            memory=memory,
        )
        devices = self.devices(seat)
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        shared = sharing.for_one(seat, self.seats, run=run, nodes=self.nodes)
        return {**shared, **self.environ, **worker_environment(member, self.environ), **own}

    def devices(self, seat: Seat) -> str | None:
        """What a worker may see, where that is not what all of them see."""
        return self._only_device(seat) if self.devices_isolated or self.virtual_local_rank else None

    def seated(
        self,
        seats: Sequence[Seat],
        *,
        world_size: int,
        nodes: int,
        topology: str,
        master: tuple[str, int],
        interface: str | None,
        spare: bool = False,
    ) -> Plan:
        """The same, once everybody has joined and it is known which ranks are this node's."""
        own = {}
        if interface is not None:
            own = {name: form.format(interface) for name, form in INTERFACES.items() if name not in self.environ}
        # One device for each of several tasks on this node: its number is 0 in every one of them.
        alone = len(self.seats) == 1 and self.seats[0].slot.device is not None and seats[0].local_world_size > 1
        return replace(
            self,
            placement=Placement(tuple(seats), world_size),
            node=seats[0].node,
            nodes=nodes,
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
        # torchrun's --virtual-local-rank counts devices without asking whether they exist.
        visible = self.environ.get("CUDA_VISIBLE_DEVICES")
        return str(seat.local_rank) if visible is None else visible.split(",")[seat.local_rank].strip()
