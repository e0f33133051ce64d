"""What a node tells the leader about itself, and which slot each of its ranks gets."""

from __future__ import annotations

import os
import time

from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.control import interfaces
from phalanx.control.messages import Claim, NodeInfo, StartRanks
from phalanx.errors import DeviceError
from phalanx.launcher.coordination.rendezvous_config import RendezvousConfig
from phalanx.launcher.plan import Plan


def node_info(plan: Plan | None, rendezvous: RendezvousConfig, trouble: str = "", failover_port: int = 0) -> NodeInfo:
    """Return what this node tells the leader when it joins.

    `trouble`: why it cannot take part. `failover_port`: where it listens if it has to lead.
    """
    task = rendezvous.task
    claim = None
    if task is not None:
        claim = Claim(
            rank=task.rank,
            size=task.size,
            local_rank=task.local_rank,
            local_size=task.local_size,
            node=task.node,
        )
    return NodeInfo(
        run=rendezvous.terms.run,
        member=rendezvous.member,
        host=os.uname().nodename,
        pid=os.getpid(),
        slots=len(plan.seats) if plan is not None else 0,
        versions=rendezvous.terms.versions,
        terms=rendezvous.terms.settings,
        claim=claim,
        trouble=trouble,
        time=time.time(),
        failover_port=failover_port,
    )


def assigned_plan(plan: Plan, start: StartRanks, *, leader_address: str, own_address: str) -> Plan:
    """Return the plan with the ranks that this node got. `own_address`: on the interface towards the leader."""
    return plan.seated(
        assign_seats(plan, start),
        world_size=start.world_size,
        nodes=start.nodes,
        topology=start.topology,
        master=(leader_address, start.store_port),
        interface=interfaces.owner(own_address, interfaces.survey()),
        spare=not start.ranks,
    )


def assign_seats(plan: Plan, start: StartRanks) -> list[Seat]:
    """Return a slot for each rank of this node. A task that is one rank takes the device of its local rank.

    The workers of a spare node are numbered after the last rank.
    """
    slots = [seat.slot for seat in plan.seats]
    if not start.ranks:
        return [Seat(start.world_size + place, start.node, place, len(slots), slot) for place, slot in enumerate(slots)]
    if len(start.ranks) == 1 and start.local_world_size > 1:
        slots = [_slot(plan, start)]
    return [
        Seat(rank, start.node, local_rank, start.local_world_size, slot)
        for rank, local_rank, slot in zip(start.ranks, start.local_ranks, slots, strict=True)
    ]


def _slot(plan: Plan, start: StartRanks) -> Slot:
    slots = [seat.slot for seat in plan.seats]
    if len(slots) == 1:
        return slots[0]
    local = start.local_ranks[0]
    if local >= len(slots):
        raise DeviceError(
            f"this task is number {local} on its node, and {len(slots)} devices can be used here",
            fix="ask the scheduler for as many tasks a node as it has devices, or for one task a node",
        )
    return slots[local]
