"""How the agents of a run find each other: decided before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.cluster.sources.task import SchedulerTask

if TYPE_CHECKING:  # a run on one node does not need these imports
    from phalanx.control.leader_file import LeaderFile
    from phalanx.control.tokens import Token


@dataclass(frozen=True)
class RendezvousConfig:
    """How the agents of a run find each other."""

    source: str  # "the command line", "ssh", "Slurm" or "Open MPI"
    expected: int  # maximum number of agents
    member: int | None  # number of this agent; None: the leader assigns it
    leads: bool | None  # None: the agent that has the address leads
    host: str | None  # of the leader, as given
    port: int  # 0: the leader chooses a free one and publishes it
    token: Token
    run: str = ""  # id, if the user gave one
    addresses: tuple[str, ...] = ()  # of the leader, if known
    promised: tuple[int, ...] = ()  # workers per node, if the user gave them
    task: SchedulerTask | None = None  # set if a scheduler started this process
    leader_file: LeaderFile | None = None  # in which tasks find their leader if its name does not resolve
    join_timeout: float = 300.0
    node_timeout: float = 15.0
    least: int = 0  # minimum number of nodes; 0: all of them
    spares: int = 0  # extra nodes that replace lost ones
    last_call: float = 3.0  # seconds to wait for more nodes once there are enough
    names: tuple[str, ...] = ()  # hosts of the members, by number, if known in advance
    echo: bool = True  # members print the output of their ranks; else only node 0 does
    versions: dict[str, str] = field(default_factory=dict)
    terms: dict[str, str] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """Return what a member is called: a node, or a task that is one of several ranks on its node."""
        return "task" if self.task is not None and self.task.one_a_node is not True else "node"

    @property
    def elastic(self) -> bool:
        """Return whether nodes may join and leave during the run."""
        return bool(self.spares) or 0 < self.least < self.expected

    @property
    def managed(self) -> bool:
        """Return whether one command started all agents, so that the user cannot restart a single one."""
        return not self.echo
