"""How the agents of a run find each other: decided before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from phalanx.cluster.sources.task import SchedulerTask

if TYPE_CHECKING:  # a run on one node does not need these imports
    from phalanx.control.leader_file import LeaderFile
    from phalanx.control.tokens import Token


AttachFrom = Literal["leader", "all", "none"]


@dataclass(frozen=True)
class LeaderLocation:
    """Where the leader can be reached."""

    host: str | None = None  # as given
    port: int = 0  # 0: the leader chooses a free one and publishes it
    addresses: tuple[str, ...] = ()  # if known
    file: LeaderFile | None = None  # in which tasks find their leader if its name does not resolve


@dataclass(frozen=True)
class RendezvousTimeouts:
    """How long nodes wait for each other, in seconds."""

    join: float = 300.0
    node: float = 15.0  # without a message: the node is lost
    last_call: float = 3.0  # for more nodes to join once there are enough


@dataclass(frozen=True)
class JoinTerms:
    """What a node compares with the others when it joins."""

    run: str = ""  # id, if the user gave one
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # equal on all nodes


@dataclass(frozen=True)
class RendezvousConfig:
    """How the agents of a run find each other."""

    source: str  # "the command line", "ssh", "Slurm" or "Open MPI"
    expected: int  # maximum number of agents
    member: int | None  # number of this agent; None: the leader assigns it
    leads: bool | None  # None: the agent that has the address leads
    token: Token
    location: LeaderLocation = LeaderLocation()
    timeouts: RendezvousTimeouts = RendezvousTimeouts()
    terms: JoinTerms = field(default_factory=JoinTerms)
    promised: tuple[int, ...] = ()  # workers per node, if the user gave them
    task: SchedulerTask | None = None  # set if a scheduler started this process
    least: int = 0  # minimum number of nodes; 0: all of them
    spares: int = 0  # extra nodes that replace lost ones
    names: tuple[str, ...] = ()  # hosts of the members, by number, if known in advance
    attach_from: AttachFrom = "leader"  # which nodes may attach a debugger to the ranks of this one
    echo: bool = True  # members print the output of their ranks; else only node 0 does

    @property
    def noun(self) -> str:
        """Return the noun for a member: a node, or a task that is one of several ranks on its node."""
        return "task" if self.task is not None and self.task.one_a_node is not True else "node"

    @property
    def elastic(self) -> bool:
        """Return whether nodes may join and leave during the run."""
        return bool(self.spares) or 0 < self.least < self.expected

    @property
    def managed(self) -> bool:
        """Return whether one command started all agents, so that the user cannot restart a single one."""
        return not self.echo
