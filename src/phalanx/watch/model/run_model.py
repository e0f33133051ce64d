"""The model of a run, folded from its events. Pure: time comes from the events only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.contract import events
from phalanx.contract.run_metadata import RunMetadata
from phalanx.watch.model import events_timeline
from phalanx.watch.model.events_timeline import EventsTimeline
from phalanx.watch.model.problems import RunProblems
from phalanx.watch.model.progress import Progress
from phalanx.watch.model.ranks import RankViews
from phalanx.watch.model.series.resources import Resources
from phalanx.watch.model.status import RunStatus
from phalanx.watch.model.stragglers import Stragglers

_BACK = 60.0  # seconds: a sample that is older than this means that the clock was changed
_LETTERS = 50  # letters of a sample that count for stragglers
_CHANGES_HEALTH = (
    events.RankInfos,
    events.AttemptStarted,
    events.Stalled,
    events.VerdictEvent,
    events.Resumed,
    events.FaultEvent,
    events.Recovered,
    events.Restarted,
    events.WorkerFailed,
    events.StepTimingReport,
    events.RunEnded,
)


@dataclass
class RunModel:
    """Everything that viewers show of a run. Call `apply` with each event. Each part folds the events it needs."""

    run: RunStatus = field(default_factory=RunStatus)
    ranks: RankViews = field(default_factory=RankViews)
    progress: Progress = field(default_factory=Progress)
    resources: Resources = field(default_factory=Resources)
    problems: RunProblems = field(default_factory=RunProblems)
    stragglers: Stragglers = field(default_factory=Stragglers)
    timeline: EventsTimeline = field(default_factory=EventsTimeline)
    links: events.Links | None = None
    fork_server: events.ForkServerReady | None = None
    metadata: RunMetadata | None = None  # hyperparameters, commit, versions, machine, once they are known
    now: float = 0.0  # time of the latest event

    @property
    def lost(self) -> float:
        """Seconds lost to faults and stalls, the current one included."""
        return self.problems.lost_time.total(self.now)

    @property
    def goodput(self) -> float:
        """Share of the time since the first step that was not lost: see goodput.py."""
        return self.problems.lost_time.goodput(self.now)

    def apply(self, event: events.AnyEvent) -> None:
        """Fold an event into the model."""
        if isinstance(event, events.ClusterSample) and event.time < self.now - _BACK:
            self.now, self.problems.since = event.time, -math.inf
        self.now = max(self.now, event.time)
        match event:
            case events.ClusterSample():
                self._sample(event)
            case events.MetricsMeasured():
                more = self.progress.measured(event, running=self.run.state == "running")
                # During a recovery this may be an old step.
                if more and event.time >= self.problems.since and self.run.state != "recovering":
                    self._stepped(event.time)
            case events.WorkerStarted() | events.RankChanged() | events.WorkerExited():
                view = self.ranks.worker(event)
                if view is not None:
                    self.ranks.update_health(self.problems.stuck, self.stragglers.slow, view)
            case events.ForkServerReady():
                self.fork_server = event
            case events.RunDescribed():
                self.metadata = event.metadata
                self.run.name = event.metadata.run  # the folder of a node gets the name of the run when it joins
            case events.Links():
                self.links = event
            case _:
                self._fold(event)

    def _fold(self, event: events.AnyEvent) -> None:
        entry = self.timeline.apply(event)
        if isinstance(event, events.RendezvousProgress):
            line = events_timeline.joined(self.run.rendezvous, event)
            if line is not None:
                self.timeline.add(line)
        self.problems.apply(event, entry, stalled=self.run.state == "stalled", step_seconds=self.progress.step_seconds)
        self.run.apply(event)
        self.ranks.apply(event)
        self.progress.apply(event)
        for line in self.stragglers.apply(event):
            self.timeline.add(line)
        if isinstance(event, _CHANGES_HEALTH):
            self._update_health()

    def _sample(self, event: events.ClusterSample) -> None:
        """Fold a sample; there is one per second."""
        now = event.time
        self.run.apply(event)
        sample = self.ranks.sampled(event)
        if not sample.starting and now >= self.problems.since and self.run.left_startup() and self.progress.step < 0:
            self.problems.lost_time.end(now)  # its steps are unknown: treat this as the end of the lost time
        if self.problems.sampled(now, sample.furthest):
            self._stepped(now)
        self.progress.sampled(now, sample.furthest, sample.samples, halted=self.run.halted, at_work=sample.at_work)
        self.resources.sampled(event, self.progress.step)
        if self.run.halted:
            self.ranks.halt()
        if self.run.state == "running":
            self.ranks.prune(now)
            letters = {each.rank: each.phases[-_LETTERS:] for each in event.ranks if each.phases}
            line = self.stragglers.sampled(now, letters)
            if line is not None:
                self.timeline.add(line)
        self.ranks.mark_missing(event)
        self._update_health()

    def _stepped(self, when: float) -> None:
        self.run.stepped()
        self.problems.stepped(when)

    def _update_health(self) -> None:
        self.ranks.update_health(self.problems.stuck, self.stragglers.slow)
