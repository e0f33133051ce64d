"""The actions that a coordinator returns: it decides, and the agent executes. Plain data, which all packages of the
launcher share.

    action = coordinator.worker_failed(failure)
    agent.perform(action)
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass

from phalanx.launcher.plan import Plan


@dataclass(frozen=True)
class StartAttempt:
    """Start an attempt."""

    attempt: int
    plan: Plan
    listener: socket.socket | None  # of the store, if this node hosts it
    generation: int = 0  # of the group that this node joins


@dataclass(frozen=True)
class RegroupPlan:
    """Form a new group: survivors keep their processes, dead workers are replaced."""

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
    failed: bool = True  # the reason is a failure


@dataclass(frozen=True)
class HoldWorkers:
    """Too few nodes remain: workers leave their group and wait with their state in memory."""

    why: str


@dataclass(frozen=True)
class RefuseRegroup:
    """No group can form again: workers that have lost a rank do not wait for an assignment."""


@dataclass(frozen=True)
class HaltWorkers:
    """Workers report their committed step (`step` None), or write a checkpoint at `step` and end."""

    step: int | None


@dataclass(frozen=True)
class AcceptLoss:
    """Do not replace a dead worker. If it was the last one, the attempt is over."""


@dataclass(frozen=True)
class SignalWorkers:
    """Forward a signal that does not end the run to the workers that handle it."""

    signal: signal.Signals


@dataclass(frozen=True)
class EndRun:
    """End the run on this node, as if by a signal of the user."""

    signal: signal.Signals
    reason: str


Action = RegroupPlan | StopWorkers | HoldWorkers | RefuseRegroup | HaltWorkers | AcceptLoss | SignalWorkers | EndRun
