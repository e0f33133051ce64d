"""What a coordinator tells the agent of its node to do. The coordinator decides, the agent executes.

action = coordinator.failing(failure)
agent.perform(action)
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass

from phalanx.launcher.plan import Plan


@dataclass(frozen=True)
class RegroupPlan:
    """Form a new group: survivors stay, and the dead are replaced."""

    generation: int
    why: str
    plan: Plan  # the ranks of this node from now on
    listener: socket.socket | None  # of the store, if this node hosts it
    halt: bool = False  # save a checkpoint and end


@dataclass(frozen=True)
class StopWorkers:
    """End this attempt: stop all workers of the node, and kill them after `grace` seconds."""

    signal: signal.Signals
    reason: str
    grace: float


@dataclass(frozen=True)
class HoldWorkers:
    """Too few nodes are left: workers leave their group, keep their state, and wait."""

    why: str


@dataclass(frozen=True)
class HaltWorkers:
    """Workers report the step they have committed (None), or end at `step` with a checkpoint."""

    step: int | None


@dataclass(frozen=True)
class AcceptLoss:
    """Do not replace a dead worker. If it was the last one, the attempt is over."""


@dataclass(frozen=True)
class SignalWorkers:
    """Forward a signal that ends nothing to the workers that handle it."""

    signal: signal.Signals


@dataclass(frozen=True)
class EndRun:
    """End the run on this node, as by a signal of the user."""

    signal: signal.Signals
    reason: str


Action = RegroupPlan | StopWorkers | HoldWorkers | HaltWorkers | AcceptLoss | SignalWorkers | EndRun
