"""The state of a run, as a whole.

gathering    waiting for nodes (RendezvousProgress with missing nodes)
starting     all ranks are still importing or joining
running
stalled      no progress (Stalled, VerdictEvent), until the next step or Resumed
recovering   after a fault that the run survives, until the first step after it (Recovered) or a restart of all ranks
             (Restarted)
stopping     ranks are being stopped
done
stopped      by Ctrl-C, `phalanx stop` or a preemption
failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.contract import events
from phalanx.contract.exit_codes import stopped_by

State = Literal["gathering", "starting", "running", "stalled", "recovering", "stopping", "done", "stopped", "failed"]
# Exit code of a run that was stopped by SIGINT or SIGTERM -> the user's name for it
STOPPED = {code: f"stopped by {stopped_by(code)}" for code in (130, 143)}


@dataclass
class RunStatus:
    """The identity of the run, its state, and its end. Call `apply` with each event."""

    name: str = ""
    command: tuple[str, ...] = ()
    state: State = "starting"
    started: float = 0.0
    ended: float | None = None
    code: int | None = None
    generation: int = 0
    attempt: int = 0
    rendezvous: events.RendezvousProgress | None = None  # while nodes are missing
    preempted: bool = False  # the run has ended with a checkpoint, and the same command resumes it
    _failed: bool = False  # a worker has failed in this attempt

    @property
    def halted(self) -> bool:
        """Whether no steps are made because of a stall or a fault."""
        return self.state in ("stalled", "recovering")

    def apply(self, event: events.AnyEvent) -> None:
        """Fold an event into the state."""
        match event:
            case events.ClusterSample():
                self.generation = event.generation
            case events.RunStarted():
                self.name, self.command, self.started = event.run, event.command, event.time
            case events.RendezvousProgress():
                self._rendezvous(event)
            case events.AttemptStarted():
                self.attempt, self.rendezvous, self._failed = event.attempt, None, False
                self._set("starting", only=("gathering", "recovering", "running", "stalled"))
            case events.Stalled() | events.VerdictEvent() | events.Resumed():
                self._stall(event)
            case events.FaultEvent() | events.Recovered() | events.Restarted():
                self._fault(event)
            case events.Stopping():
                self._set("stopping", unless=("recovering",))
            case events.Preempted():
                self._set("stopping")
            case events.WorkerFailed():
                self._failed = True
            case events.RunEnded():
                self.preempted = event.preempted
                self._set(self._end(event.code))
                self.ended, self.code, self.rendezvous = event.time, event.code, None

    @property
    def words(self) -> str:
        """The state, and how it ended: `failed (exit code 1)`, `stopped by Ctrl-C`, `preempted`."""
        if self.preempted:
            return "preempted"
        if self.state == "failed" and self.code is not None:
            return f"failed (exit code {self.code})"
        return STOPPED.get(self.code or 0, self.state) if self.state == "stopped" else self.state

    def _end(self, code: int) -> State:
        if self.preempted or (code in STOPPED and not self._failed):
            return "stopped"
        return "failed" if code else "done"

    def left_startup(self) -> bool:
        """Record that a rank has imported and joined. Return whether the run was in state `starting` until now."""
        starting = self.state in ("starting", "gathering")
        if starting:
            self._set("running")
        return starting

    def stepped(self) -> None:
        """Record a step: a start, stall or recovery is over."""
        self.rendezvous = None
        self._set("running", only=("gathering", "starting", "stalled", "recovering"))

    def _rendezvous(self, event: events.RendezvousProgress) -> None:
        if event.missing or len(event.joined) < event.expected:
            self.rendezvous = event
            self._set("gathering", only=("starting",))
        else:
            self.rendezvous = None
            self._set("starting", only=("gathering",))

    def _stall(self, event: events.Stalled | events.VerdictEvent | events.Resumed) -> None:
        if isinstance(event, events.Resumed):
            self._set("running", only=("stalled",))
        else:
            self._set("stalled", unless=("stopping",))

    def _fault(self, event: events.FaultEvent | events.Recovered | events.Restarted) -> None:
        match event:
            case events.FaultEvent(recovery="stop"):
                self._set("stopping")
            case events.FaultEvent():
                self._set("recovering", unless=("stopping",))
            case events.Recovered():
                self.generation = max(self.generation, event.generation)
                self._set("running", only=("recovering", "starting", "stalled"))
            case events.Restarted():
                self._set("starting", only=("recovering", "running", "stalled"))

    def _set(self, state: State, *, only: tuple[State, ...] = (), unless: tuple[State, ...] = ()) -> None:
        if self.ended is None and (not only or self.state in only) and self.state not in unless:
            self.state = state
