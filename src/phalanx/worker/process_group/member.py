"""The identity of a process in its process group."""

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
        """`group.folder`: the run folder; None without `phalanx run`."""

    @property
    def rank(self) -> int:
        """`group.rank`: the number of this process, from 0 to `world_size - 1`."""
        return self.membership.placement.rank

    @property
    def world_size(self) -> int:
        """`group.world_size`: the number of ranks."""
        return self.membership.placement.world_size

    @property
    def is_main(self) -> bool:
        """`group.is_main`: whether this is rank 0."""
        return self.membership.placement.rank == 0

    @property
    def local_rank(self) -> int:
        """`group.local_rank`: the number of this process on its node."""
        return self.membership.placement.local_rank

    @property
    def local_world_size(self) -> int:
        """`group.local_world_size`: the number of ranks on this node."""
        return self.membership.placement.local_world_size

    @property
    def node_rank(self) -> int:
        """`group.node_rank`: the number of this node."""
        return self.membership.placement.node_rank

    @property
    def nodes(self) -> int:
        """`group.nodes`: the number of nodes."""
        return self.membership.placement.node_count

    @property
    def topology(self) -> Topology:
        """`group.topology`: which ranks share a node."""
        return self.membership.topology

    @property
    def device(self) -> torch.device:
        """`group.device`: where this rank computes: its GPU, or the CPU."""
        return self.membership.device

    @property
    def backend(self) -> str:
        """`group.backend`: the backend of the process group."""
        return self.membership.backend

    @property
    def generation(self) -> int:
        """`group.generation`: how often the process group was formed again after a failure; 0 the first time."""
        return self.membership.identity.generation or 0

    @property
    def launcher(self) -> str:
        """`group.launcher`: what started this process: "phalanx run", "torchrun", "srun", ..."""
        return self.membership.identity.launcher
