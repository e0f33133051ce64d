"""The information that a node sends to the leader, and the slot of each of its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.control import interfaces
from phalanx.control.messages import NodeInfo, StartRanks
from phalanx.errors import DeviceError
from phalanx.launcher.plan import Plan
from phalanx.launcher.rendezvous_config import RendezvousConfig


def node_info(plan: Plan | None, rendezvous: RendezvousConfig, trouble: str = "", failover_port: int = 0) -> NodeInfo:
    """Return the information that this node sends to the leader when it joins.

    `trouble`: why it cannot take part. `failover_port`: where it listens if it becomes leader.
    """
    task = rendezvous.task
    return NodeInfo(
        run=rendezvous.terms.run,
        member=rendezvous.member,
        host=os.uname().nodename,
        pid=os.getpid(),
        slots=len(plan.seats) if plan is not None else 0,
        versions=rendezvous.terms.versions,
        terms=rendezvous.terms.settings,
        claim=None if task is None else task.placement,
        trouble=trouble,
        time=time.time(),
        failover_port=failover_port,
    )


def assigned_plan(plan: Plan, start: StartRanks, *, leader_address: str, own_address: str) -> Plan:
    """Return the plan with the ranks assigned to this node. `own_address`: on the interface towards the leader."""
    return plan.seated(
        assign_seats(plan, start),
        topology=start.topology,
        master=(leader_address, start.store_port),
        interface=interfaces.owner(own_address, interfaces.survey()),
        spare=start.spare,
    )


def assign_seats(plan: Plan, start: StartRanks) -> list[Seat]:
    """Return a slot for each placement of this node. A task that is one rank uses the device of its local rank."""
    slots = [seat.slot for seat in plan.seats]
    first = start.placements[0]
    if len(start.placements) == 1 and first.local_world_size > 1:
        slots = [_slot(slots, first.local_rank)]
    return [Seat(placement, slot) for placement, slot in zip(start.placements, slots, strict=True)]


def _slot(slots: Sequence[Slot], local_rank: int) -> Slot:
    if len(slots) == 1:
        return slots[0]
    if local_rank >= len(slots):
        raise DeviceError(
            f"this task is number {local_rank} on its node, and {len(slots)} devices can be used here",
            fix="ask the scheduler for as many tasks per node as it has devices, or for one task per node",
        )
    return slots[local_rank]
