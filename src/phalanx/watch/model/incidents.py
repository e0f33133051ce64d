"""What went wrong in a run, one entry each, and what each has cost. Folded from events, pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.contract import events

MOST = 1000  # entries; a run that fails more often has another problem


@dataclass(frozen=True)
class Incident:
    time: float
    kind: Literal["fault", "stall", "preemption"]
    text: str
    ranks: tuple[int, ...] = ()
    remedy: str = ""  # regroup, restart, stop; of a stall: fault
    seconds: float | None = None  # that it took until all went on; None: they did not, or it counts to the one before
    redone: int = 0  # steps that were made again
    step: int = -1  # the first that was committed after it; -1: not known

    @property
    def outcome(self) -> str:
        """In words."""
        if self.kind == "preemption":
            return f"ended for now: step {self.step} is in a checkpoint"
        if self.remedy == "stop":
            return "the run was ended"
        if self.seconds is None:
            done = {"regroup": "regrouped", "restart": "started all ranks again"}.get(self.remedy)
            return f"{done}, and no step was made since" if done else "it did not go on"
        if self.kind == "stall":
            return "it ended by a fault" if self.remedy == "fault" else "it went on by itself"
        if self.remedy == "restart":
            return "all ranks were started again"
        again = "no step lost" if not self.redone else f"{self.redone} step{'s' * (self.redone > 1)} made again"
        return f"regrouped: step {self.step} was the next, {again}"


@dataclass
class Incidents:
    entries: list[Incident] = field(default_factory=list)
    left_out: int = 0
    _open: list[int] = field(default_factory=list)  # entries that are not settled

    def see(self, event: events.AnyEvent) -> None:
        match event:
            case events.FaultEvent() if not event.joins:
                self._settle_stall(event.time)
                self._add(Incident(event.time, "fault", event.reason, (event.rank,), event.recovery))
            case events.Recovered():
                self._settle("fault", event.seconds, redone=event.redone, step=event.step)
            case events.Restarted():
                self._settle("fault", event.seconds)
            case events.Stalled():
                if not any(self.entries[index].kind == "stall" for index in self._open):
                    self._add(Incident(event.time - event.seconds, "stall", "no rank went on"))
            case events.VerdictEvent():
                self._judged(event)
            case events.Resumed():
                self._settle("stall", event.seconds)
            case events.Preempted():
                took = event.seconds
                self._add(Incident(event.time, "preemption", "asked to end", seconds=took, step=event.step))

    def _add(self, entry: Incident) -> None:
        if len(self.entries) >= MOST:
            self.left_out += 1
            return
        if entry.seconds is None and entry.remedy != "stop":
            self._open.append(len(self.entries))
        self.entries.append(entry)

    def _judged(self, event: events.VerdictEvent) -> None:
        """The first verdict about a stall names it."""
        for index in self._open:
            if self.entries[index].kind == "stall" and not self.entries[index].ranks:
                self.entries[index] = replace(self.entries[index], text=event.text, ranks=event.ranks)
                return
        if not self._open:
            self._add(Incident(event.time, "stall", event.text, event.ranks))

    def _settle(self, kind: str, seconds: float, *, redone: int = 0, step: int = -1) -> None:
        """Of several faults that were mended at once the first one has all of the cost."""
        concerned = [index for index in self._open if self.entries[index].kind == kind]
        for place, index in enumerate(concerned):
            first = place == 0
            self.entries[index] = replace(
                self.entries[index], seconds=seconds if first else 0.0, redone=redone if first else 0, step=step
            )
        self._open = [index for index in self._open if index not in concerned]

    def _settle_stall(self, when: float) -> None:
        """It ended by a fault."""
        for index in self._open:
            if self.entries[index].kind == "stall":
                stood = max(0.0, when - self.entries[index].time)
                self.entries[index] = replace(self.entries[index], seconds=stood, remedy="fault")
        self._open = [index for index in self._open if self.entries[index].kind != "stall"]
