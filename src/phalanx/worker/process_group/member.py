"""Who a process is in its process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from phalanx.worker.rendezvous.membership import Membership
    from phalanx.worker.rendezvous.topology import Topology


class GroupMember:
    """The placement of this process in the group, and its device."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.folder: str | None = membership.identity.folder
        """`run.folder`: the run folder; None without `phalanx run`."""

    @property
    def rank(self) -> int:
        """`run.rank`: the number of this process, from 0 to `world_size - 1`."""
        return self.membership.placement.rank

    @property
    def world_size(self) -> int:
        """`run.world_size`: the number of ranks."""
        return self.membership.placement.world_size

    @property
    def is_main(self) -> bool:
        """`run.is_main`: whether this is rank 0."""
        return self.membership.placement.rank == 0

    @property
    def local_rank(self) -> int:
        """`run.local_rank`: the number of this process on its node."""
        return self.membership.placement.local_rank

    @property
    def local_world_size(self) -> int:
        """`run.local_world_size`: the number of ranks on this node."""
        return self.membership.placement.local_world_size

    @property
    def node_rank(self) -> int:
        """`run.node_rank`: the number of this node."""
        return self.membership.placement.node_rank

    @property
    def nodes(self) -> int:
        """`run.nodes`: the number of nodes."""
        return self.membership.placement.node_count

    @property
    def topology(self) -> Topology:
        """`run.topology`: which ranks share a node."""
        return self.membership.topology

    @property
    def device(self) -> torch.device:
        """`run.device`: where this rank computes: its GPU, or the CPU."""
        return self.membership.device

    @property
    def backend(self) -> str:
        """`run.backend`: the backend of the process group."""
        return self.membership.backend

    @property
    def launcher(self) -> str:
        """`run.launcher`: what started this process: "phalanx run", "torchrun", "srun", ..."""
        return self.membership.identity.launcher
