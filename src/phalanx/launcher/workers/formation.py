"""A generation of the group on this node, and the assignments of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.contract.messages import worker_messages
from phalanx.launcher.plan import Plan
from phalanx.launcher.workers.worker import Worker

_SLACK = 5.0  # seconds until all nodes know about the loss of a node


@dataclass(frozen=True)
class Formation:
    """A generation of the group on this node: its plan, and why it was formed."""

    plan: Plan
    generation: int
    why: str = ""
    held: str = ""  # why the workers wait: too few nodes remain
    halt: bool = False  # it writes a checkpoint and ends

    def assignment(self, worker: Worker) -> worker_messages.FromAgent:
        """Return the assignment of a worker, or Wait if it has no rank."""
        plan, group, seat = self.plan, self.plan.group, worker.seat
        preempt = tuple(map(int, plan.shutdown.preempt_signals))
        if worker.spare or self.held:
            return worker_messages.Wait(self.held, preempt)
        rendezvous = plan.rendezvous
        return worker_messages.Assignment(
            generation=self.generation,
            placement=plan.devices.worker_placement(seat),
            topology=group.topology,
            address=group.master_addr,
            port=group.master_port,
            why=self.why,
            devices=plan.devices.visible(seat, plan.environ),
            **({} if rendezvous is None else {"patience": rendezvous.timeouts.node + _SLACK}),
            halt=self.halt,
            preempt=preempt,
        )
