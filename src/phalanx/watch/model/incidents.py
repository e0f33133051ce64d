"""The faults, stalls and preemptions of a run, with the cost of each. Folded from events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.contract import events

MOST = 1000  # entries; a run that fails more often has another problem


@dataclass(frozen=True)
class Incident:
    """A fault, a stall or a preemption."""

    time: float
    kind: Literal["fault", "stall", "preemption"]
    text: str
    ranks: tuple[int, ...] = ()
    remedy: str = ""  # regroup, restart, skip, stop; of a stall: fault, end
    seconds: float | None = None  # until the next step; None: there was none
    redone: int = 0  # steps computed again
    step: int = -1  # the first step committed after it; -1: unknown

    @property
    def outcome(self) -> str:
        """A sentence about how it ended."""
        if self.kind == "preemption":
            return f"preempted: step {self.step} is in a checkpoint"
        if self.remedy == "stop":
            return "the run was stopped"
        if self.seconds is None:
            done = {"regroup": "regrouped", "restart": "restarted all ranks"}.get(self.remedy)
            return f"{done}; no step since then" if done else "not resolved"
        if self.kind == "stall":
            return {"fault": "ended by a fault", "end": "until the run ended"}.get(self.remedy, "resumed by itself")
        if self.remedy == "restart":
            return "restarted all ranks"
        if self.remedy == "skip":
            return f"the batch of step {self.step} was skipped"
        cost = "no step lost" if not self.redone else f"{self.redone} step{'s' * (self.redone > 1)} done again"
        return f"regrouped: next step {self.step}, {cost}"


@dataclass
class Incidents:
    """All incidents of a run. Call `apply` with each event."""

    entries: list[Incident] = field(default_factory=list)
    left_out: int = 0  # incidents beyond MOST
    _open: list[int] = field(default_factory=list)  # indexes of incidents that are not over

    def apply(self, event: events.AnyEvent) -> None:
        """Fold an event into the list."""
        match event:
            case events.FaultEvent() if event.kind != "node-joined":
                self._close_stall(event.time, "fault")
                self._add(Incident(event.time, "fault", event.reason, (event.rank,), event.recovery))
            case events.Recovered():
                self._close("fault", event.seconds, redone=event.redone, step=event.step)
            case events.Restarted():
                self._close("fault", event.seconds)
            case events.BatchSkipped():
                lost = event.seconds
                self._add(Incident(event.time, "fault", event.reason, (), "skip", seconds=lost, step=event.step))
            case events.Stalled():
                if not any(self.entries[index].kind == "stall" for index in self._open):
                    self._add(Incident(event.time - event.seconds, "stall", "no progress"))
            case events.VerdictEvent():
                self._explain(event)
            case events.Resumed():
                self._close("stall", event.seconds)
            case events.RunEnded():
                self._close_stall(event.time, "end")
            case events.Preempted():
                took = event.seconds
                self._add(Incident(event.time, "preemption", "preempted", seconds=took, step=event.step))

    def _add(self, entry: Incident) -> None:
        if len(self.entries) >= MOST:
            self.left_out += 1
            return
        if entry.seconds is None and entry.remedy != "stop":
            self._open.append(len(self.entries))
        self.entries.append(entry)

    def _explain(self, event: events.VerdictEvent) -> None:
        """Use the first verdict about a stall as its text."""
        for index in self._open:
            if self.entries[index].kind == "stall" and not self.entries[index].ranks:
                self.entries[index] = replace(self.entries[index], text=event.text, ranks=event.ranks)
                return
        if not self._open:
            self._add(Incident(event.time, "stall", event.text, event.ranks))

    def _close(self, kind: str, seconds: float, *, redone: int = 0, step: int = -1) -> None:
        """Close all open incidents of a kind. The whole cost is assigned to the first one."""
        concerned = [index for index in self._open if self.entries[index].kind == kind]
        for place, index in enumerate(concerned):
            first = place == 0
            self.entries[index] = replace(
                self.entries[index], seconds=seconds if first else 0.0, redone=redone if first else 0, step=step
            )
        self._open = [index for index in self._open if index not in concerned]

    def _close_stall(self, when: float, remedy: str) -> None:
        """Close an open stall that was ended by a fault or by the end of the run."""
        for index in self._open:
            if self.entries[index].kind == "stall":
                seconds = max(0.0, when - self.entries[index].time)
                self.entries[index] = replace(self.entries[index], seconds=seconds, remedy=remedy)
        self._open = [index for index in self._open if self.entries[index].kind != "stall"]
