"""How the agents of a run find each other: decided before anything starts, whoever said it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.cluster.sources.task import SchedulerTask

if TYPE_CHECKING:  # a run on one node has no use for it, and would start later
    from phalanx.control.leader_file import LeaderFile
    from phalanx.control.tokens import Token


@dataclass(frozen=True)
class RendezvousConfig:
    source: str  # who said so: "the command line", "ssh", "Slurm", "Open MPI"
    expected: int  # agents, at most
    member: int | None  # which of them this one is; None: the leader numbers it
    leads: bool | None  # None: whoever has the address
    host: str | None  # of the leader, as it was told
    port: int  # 0: the leader takes a free one, and tells it
    token: Token
    run: str = ""  # id, where the user gave one
    addresses: tuple[str, ...] = ()  # the leader's, where it told them
    promised: tuple[int, ...] = ()  # workers of every node, where the user said them
    task: SchedulerTask | None = None  # this process is one that a scheduler started
    leader_file: LeaderFile | None = None  # in which tasks find their leader if its name does not resolve
    join_timeout: float = 300.0
    node_timeout: float = 15.0
    least: int = 0  # with so many it can begin and go on; 0: with all of them
    spares: int = 0  # more than are expected, who wait for one to be lost
    last_call: float = 3.0  # for the others, once there are enough
    names: tuple[str, ...] = ()  # hosts of the members, by number, where they are known beforehand
    echo: bool = True  # members show what their own ranks write; else it is seen at node 0 alone
    versions: dict[str, str] = field(default_factory=dict)
    terms: dict[str, str] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """What a member is: a node, or a task that is one rank of those on its node."""
        return "task" if self.task is not None and self.task.one_a_node is not True else "node"

    @property
    def elastic(self) -> bool:
        """Nodes may come and go."""
        return bool(self.spares) or 0 < self.least < self.expected

    @property
    def managed(self) -> bool:
        """Whether somebody has started all of them, so that none that fails is started again by hand."""
        return not self.echo
