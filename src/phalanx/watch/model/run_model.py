"""The state of a run, folded from its events. Pure: the time is that of the events.

gathering    waiting for nodes (RendezvousProgress with missing nodes)
starting     all ranks are still importing or joining
running
stalled      no progress (Stalled, VerdictEvent), until the next step or Resumed
recovering   after a fault that the run survives, until the first step after it (Recovered) or a restart of all ranks
             (Restarted)
stopping     ranks are being stopped
done, failed
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from phalanx.contract import events
from phalanx.watch.model.curve import Curve
from phalanx.watch.model.events_timeline import KINDS, EventsTimeline, TimelineEvent
from phalanx.watch.model.goodput import Goodput
from phalanx.watch.model.histogram import Histogram
from phalanx.watch.model.rank import Health, RankView
from phalanx.watch.model.rate import Rate
from phalanx.watch.model.waiting import WaitedFor, WaitingTally

__all__ = ["KINDS", "SAMPLES", "STEPS", "Health", "RankView", "RunModel", "State", "TimelineEvent"]

State = Literal["gathering", "starting", "running", "stalled", "recovering", "stopping", "done", "failed"]

STEPS, SAMPLES = "steps/s", "samples/s"  # curves that are computed here
_MOST_CURVES = 100  # a script may report any number of names
_MOST_VERDICTS = 20
_BACK = 60.0  # seconds: a sample that is older than this means that the clock was set
_SETTLED = 3.0  # seconds after which a RankInfos event is complete
_TENTH = 0.15  # seconds: a little more than one tick of a sample
_AGAIN = 600.0  # seconds until the same rank is reported as slow again


@dataclass
class RunModel:
    """All that viewers show of a run. Call `apply` with each event."""

    run: str = ""
    command: tuple[str, ...] = ()
    state: State = "starting"
    started: float = 0.0
    now: float = 0.0  # time of the latest event
    ended: float | None = None
    code: int | None = None
    world_size: int = 0
    generation: int = 0
    attempt: int = 0
    step: int = -1  # the highest step of any rank; it may decrease after a restart
    total: int = 0
    epoch: int = 0
    rate: float = 0.0  # steps per second
    samples: float = -1.0  # training samples per second of all ranks
    ranks: dict[int, RankView] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)  # loss, …, "steps/s", "samples/s"
    verdicts: list[TimelineEvent] = field(default_factory=list)  # current ones
    rendezvous: events.RendezvousProgress | None = None  # while nodes are missing
    links: events.Links | None = None
    fork_server: events.ForkServerReady | None = None
    cause: TimelineEvent | None = None  # root cause of the failure: the first worker that failed
    timeline: EventsTimeline = field(default_factory=EventsTimeline)
    lost_time: Goodput = field(default_factory=Goodput)
    times: dict[str, Histogram] = field(  # seconds per step, of all ranks
        default_factory=lambda: {"data": Histogram(), "compute": Histogram(), "waiting": Histogram()}
    )
    waiting: WaitingTally = field(default_factory=WaitingTally)
    _spares: set[int] = field(default_factory=set)  # pids
    _ended_before_stop: set[int] | None = None  # ranks; None: the run is not being stopped
    _failed: set[int] = field(default_factory=set)  # ranks whose failure stopped the run
    _late: set[int] = field(default_factory=set)  # slow ranks of the final report
    _reported_slow: dict[int, float] = field(default_factory=dict)  # rank -> when it was reported as slow
    _present: set[int] | None = None  # ranks of the latest RankInfos
    _infos_time: float = 0.0  # its time
    _furthest: int | None = None  # highest step of the sample before, since the latest trouble
    _trouble_time: float = -math.inf  # time of the latest fault, stall or restart
    _rate: Rate = field(default_factory=Rate)
    _measured: events.MetricsMeasured | None = None  # the latest one
    _measured_rate: Rate = field(default_factory=Rate)
    _step_resets: bool = False  # the training counts its steps from 0 more than once: use the sampled steps
    _step_seconds: float = 0.0  # usual seconds per step

    @property
    def timeline_events(self) -> deque[TimelineEvent]:
        """The latest lines of the list of events."""
        return self.timeline.latest

    @property
    def lost(self) -> float:
        """Seconds lost to faults and stalls, the current one included."""
        return self.lost_time.total(self.now)

    @property
    def goodput(self) -> float:
        """Share of the time since the first step that was not lost: see goodput.py."""
        return self.lost_time.goodput(self.now)

    @property
    def nodes(self) -> int:
        """The number of nodes that have ranks."""
        return len({view.node for view in self.ranks.values()})

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the last step; None: unknown."""
        if self.ended is not None or self._measured is None or self.total <= 0 or self.rate <= 0:
            return None
        return max(0, self.total - self._measured.step) / self.rate

    @property
    def stragglers(self) -> list[WaitedFor]:
        """Ranks that kept the others waiting in the last minute, the longest first."""
        return self.waiting.ranking()

    def apply(self, event: events.AnyEvent) -> None:
        """Fold an event into the model."""
        if isinstance(event, events.ClusterSample) and event.time < self.now - _BACK:
            self.now, self._trouble_time = event.time, -math.inf
        self.now = max(self.now, event.time)
        match event:
            case events.ClusterSample():
                self._sample(event)
            case events.MetricsMeasured():
                self._measure(event)
            case _:
                self._other(event, self.timeline.apply(event))

    def _other(self, event: events.AnyEvent, entry: TimelineEvent | None) -> None:
        match event:
            case events.RankInfos():
                self._rank_infos(event)
            case events.WorkerStarted() | events.RankChanged() | events.WorkerExited():
                self._worker(event)
            case events.Stalled() | events.VerdictEvent() | events.Resumed():
                self._stall(event, entry)
            case events.FaultEvent() | events.Recovered() | events.Restarted() | events.WorkerFailed():
                self._fault(event)
            case events.RunEnded():
                self._ended(event)
            case events.RendezvousProgress():
                self._rendezvous(event)
            case events.RunStarted():
                self.run, self.command, self.started = event.run, event.command, event.time
                self.world_size = event.world_size
            case events.AttemptStarted():
                self._attempt(event)
            case events.Stopping():
                self._set_state("stopping", unless=("recovering",))
                self._stop(event.time)
            case events.Preempted():
                self._set_state("stopping")
                self._stop(event.time)
            case events.StepTimingReport():
                self._step_timings(event)
            case events.ForkServerReady():
                self.fork_server = event
            case events.Links():
                self.links = event

    # -- samples, once per second

    def _sample(self, event: events.ClusterSample) -> None:
        self.generation = event.generation
        now, ranks, times = event.time, self.ranks, self.times
        furthest, samples, known, starting, at_work = -1, 0.0, False, True, False
        for sample in event.ranks:
            view = ranks.get(sample.rank) or self._view(sample.rank)
            view.apply(now, event.seconds, sample, times)
            furthest = max(furthest, sample.step)
            at_work = at_work or (not view.gone and sample.phases.strip(events.UNSEEN) != "")
            if sample.samples >= 0:
                samples, known = samples + sample.samples, True
            if starting and not view.gone and (sample.step >= 0 or view.phase not in ("import", "join")):
                starting = False
        if not starting and self.state in ("starting", "gathering") and now >= self._trouble_time:
            self._set_state("running")
            if self.step < 0:  # its steps are not known: take this as the end of the lost time
                self.lost_time.end(now)
        self._steps(now, furthest)
        self._throughput(now, samples if known else -1.0, at_work=at_work)
        if self.state == "running":
            self._prune(now)
            self.waiting.record(now, {sample.rank: sample.phases[-50:] for sample in event.ranks if sample.phases})
            self._report_slow(now)
        if len(event.ranks) < len(ranks):
            self._missed(event)
        self._update_health()

    def _missed(self, event: events.ClusterSample) -> None:
        """Mark ranks that are not in the sample as silent."""
        for view in self.ranks.values():
            if view.sampled and view.sampled != event.time and not view.gone:
                view.silent = max(view.silent, event.time - view.sampled)

    def _steps(self, now: float, furthest: int) -> None:
        """A sample that is older than the latest trouble says nothing about its end."""
        if furthest >= 0:
            self.step = furthest
            self._rate.record(now, furthest)
            if self.lost_time.first is None:
                self.lost_time.first = now
        if now >= self._trouble_time:
            if self._furthest is not None and furthest > self._furthest:
                self._progressed(now)
            self._furthest = furthest

    def _throughput(self, now: float, samples: float, *, at_work: bool) -> None:
        reported = self._measured.samples if self._measured is not None else -1.0
        self.rate = self._rate.at(now) or self._measured_rate.at(now)
        self.samples = samples if samples >= 0 else reported
        if self.state in ("stalled", "recovering"):  # the latest reported rates are out of date
            self.samples = min(0.0, self.samples)
            for view in self.ranks.values():
                view.samples = min(0.0, view.samples)
        self._step_seconds = self._rate.each or self._measured_rate.each or self._step_seconds
        halted = self.state in ("stalled", "recovering")
        if self.step >= 0 and (at_work or halted):  # do not draw the rate falling at the end of the run
            if self.rate > 0 or halted:  # else it is not known yet
                self._point(STEPS, self.step, now, self.rate)
            if self.samples >= 0:
                self._point(SAMPLES, self.step, now, self.samples)

    def _progressed(self, when: float) -> None:
        """A step was made: any trouble is over."""
        self.verdicts.clear()
        self.rendezvous = None
        self.lost_time.stepped(when)
        self._set_state("running", only=("gathering", "starting", "stalled", "recovering"))

    def _report_slow(self, now: float) -> None:
        """Add one line for all slow ranks, at most every _AGAIN seconds per rank."""
        if not any(self._is_new(rank, now) for rank in self.waiting.slow):
            return
        slow = [one for one in self.waiting.ranking() if one.rank in self.waiting.slow]
        also = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        ranks = tuple(one.rank for one in slow)
        self._reported_slow |= dict.fromkeys(ranks, now)
        self.timeline.add(now, "slow", slow[0].sentence(self.waiting.seconds) + also, ranks, slow[0].seconds)

    def _is_new(self, rank: int, now: float) -> bool:
        return not 0 <= now - self._reported_slow.get(rank, -math.inf) < _AGAIN

    # -- metrics

    def _measure(self, event: events.MetricsMeasured) -> None:
        before, self._measured = self._measured, event
        more = before is None or event.step > before.step
        if before is not None and event.step < before.step and self.state == "running":
            self._step_resets = True
        self.total, self.epoch = event.total or self.total, event.epoch
        self._measured_rate.record(event.time, event.step)
        if more and event.time >= self._trouble_time and self.state != "recovering":  # else it may be an old step
            self._progressed(event.time)
        if not self._rate.marks:  # no steps in the samples
            self.step, self.rate, self.samples = event.step, self._measured_rate.at(event.time), event.samples
        step = self.step if self._step_resets else event.step
        for name, value in event.values.items():
            if value is not None and name not in (STEPS, SAMPLES):
                self._point(name, step, event.time, value)

    def _point(self, name: str, step: int, when: float, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < _MOST_CURVES:
            curve = self.curves[name] = Curve()
        if curve is not None and math.isfinite(value):
            curve.add(step, when, value)

    # -- ranks and nodes

    def _view(self, rank: int) -> RankView:
        return self.ranks.setdefault(rank, RankView(rank))

    def _rank_infos(self, event: events.RankInfos) -> None:
        if not event.ranks:  # between two attempts
            return
        self._present = {info.rank for info in event.ranks}
        known = {(info.host, info.pid) for info in event.ranks}
        moved = [r for r in self.ranks.keys() - self._present if (self.ranks[r].host, self.ranks[r].pid) in known]
        for rank in moved:  # the process has another rank now
            del self.ranks[rank]
        self.world_size = len(self._present) if moved else max(self.world_size, len(self._present))
        for info in event.ranks:
            self._view(info.rank).place_at(info)
        self._infos_time = event.time
        self._update_health()

    def _prune(self, now: float) -> None:
        """Remove ranks that no longer exist. During a start or a regroup, RankInfos is incomplete at first."""
        if self._present is not None and now - self._infos_time >= _SETTLED:
            self.world_size = len(self._present)
            for rank in self.ranks.keys() - self._present:
                del self.ranks[rank]

    def _worker(self, event: events.WorkerStarted | events.RankChanged | events.WorkerExited) -> None:
        match event:
            case events.WorkerStarted(spare=True):
                self._spares.add(event.pid)
                return
            case events.WorkerStarted():
                view = self._view(event.rank)
                view.device = view.device or event.device
                view.start(event.pid)
            case events.RankChanged():
                self._spares.discard(event.pid)
                before = self.ranks.get(event.previous_rank)
                if before is not None and before.pid == event.pid:
                    before.start(0)
                view = self._view(event.rank)
                view.start(event.pid)
            case events.WorkerExited():
                if event.pid in self._spares:
                    self._spares.discard(event.pid)
                    return
                view = self._view(event.rank)
                if view.pid not in (0, event.pid):  # a replacement has the rank already
                    return
                view.end(event.time, event.code)
        self._update_health_of(view)

    def _rendezvous(self, event: events.RendezvousProgress) -> None:
        before = self.rendezvous.joined if self.rendezvous is not None else event.joined[:1]
        new = list((Counter(event.joined) - Counter(before)).elements())  # two nodes may have the same name
        if new:
            shown = ", ".join(new[:4]) + (f" and {len(new) - 4} more" if len(new) > 4 else "")
            self.timeline.add(event.time, "joined", f"{shown}: {len(event.joined)} of {event.expected} nodes joined")
        missing = bool(event.missing) or len(event.joined) < event.expected
        self.rendezvous = event if missing else None
        if missing:
            self._set_state("gathering", only=("starting",))
        else:
            self._set_state("starting", only=("gathering",))

    def _attempt(self, event: events.AttemptStarted) -> None:
        if event.attempt > self.attempt:
            for view in self.ranks.values():
                view.start(0)
        self.attempt, self._ended_before_stop = event.attempt, None
        self._failed.clear()
        self.rendezvous, self._measured, self._furthest, self._trouble_time = None, None, None, event.time
        self.verdicts.clear()
        self._set_state("starting", only=("gathering", "recovering", "running", "stalled"))
        self._update_health()

    # -- faults and stalls

    def _stall(self, event: events.Stalled | events.VerdictEvent | events.Resumed, entry: TimelineEvent | None) -> None:
        match event:
            case events.Stalled():
                self.verdicts.clear()  # new ones follow
                self.lost_time.begin(event.time - max(0.0, event.seconds))
                self._trouble("stalled", event.time)
            case events.VerdictEvent():
                self.lost_time.begin(event.time)
                self._trouble("stalled", event.time)
                self.verdicts += [entry] if entry is not None else []
                del self.verdicts[:-_MOST_VERDICTS]
            case events.Resumed():
                self.verdicts.clear()
                self.lost_time.end_after(event.seconds)
                self._set_state("running", only=("stalled",))
        self._update_health()

    def _fault(self, event: events.FaultEvent | events.Recovered | events.Restarted | events.WorkerFailed) -> None:
        match event:
            case events.FaultEvent(recovery="stop"):
                self._failed.add(event.rank)
                self._set_state("stopping")
            case events.FaultEvent():
                if self.state == "stalled":
                    self.lost_time.end(event.time)
                self.lost_time.begin(event.time)
                self._trouble("recovering", event.time)
            case events.Recovered():
                self.generation = max(self.generation, event.generation)
                self._measured = None  # steps may be computed again
                self.lost_time.end_after(event.seconds)
                self.lost_time.add(max(0, event.redone) * self._step_seconds)
                self.verdicts.clear()
                self._set_state("running", only=("recovering", "starting", "stalled"))
            case events.Restarted():
                self.lost_time.end_after(event.seconds)
                self.lost_time.begin(event.time)
                self.verdicts.clear()
                self._set_state("starting", only=("recovering", "running", "stalled"))
            case events.WorkerFailed():
                self.cause = TimelineEvent(event.time, "fault", event.summary, (event.rank,))
                self._failed.add(event.rank)
        self._update_health()

    def _trouble(self, state: State, when: float) -> None:
        self._set_state(state, unless=("stopping",))
        self._furthest, self._trouble_time = None, when
        self.waiting.clear()

    def _step_timings(self, event: events.StepTimingReport) -> None:
        self._late.clear()
        for one in event.slow:
            self._late.add(one.rank)
            self.timeline.add(event.time, "slow", one.text, (one.rank,))
        self._update_health()

    # -- the end

    def _ended(self, event: events.RunEnded) -> None:
        self.lost_time.end(event.time)
        self._set_state("failed" if event.code else "done")
        self.ended, self.code, self.rendezvous = event.time, event.code, None
        self.rate = 1 / self._step_seconds if self._step_seconds else 0.0
        self.samples = self.curves[SAMPLES].last or 0.0 if SAMPLES in self.curves else self.samples
        for view in self.ranks.values():
            if view.code is None:  # exit codes of other nodes are not known
                view.end(event.time, 0 if event.code == 0 else None)
            view.freeze_rate()
        self._update_health()

    def _stop(self, when: float) -> None:
        """Record which ranks had ended before. A sample may be a tenth of a second older than its events."""
        if self._ended_before_stop is None:
            self._ended_before_stop = {
                view.rank
                for view in self.ranks.values()
                if view.gone and (view.code is not None or view.ended_at < when - _TENTH)
            }

    def _set_state(self, state: State, *, only: tuple[State, ...] = (), unless: tuple[State, ...] = ()) -> None:
        if self.ended is None and (not only or self.state in only) and self.state not in unless:
            self.state = state

    def _update_health(self) -> None:
        stuck = {rank for verdict in self.verdicts for rank in verdict.ranks}
        slow = self.waiting.slow | self._late if self._late else self.waiting.slow
        for rank, view in self.ranks.items():
            view.update_health(stuck=rank in stuck, slow=rank in slow, stopped=self._stopped(rank))

    def _update_health_of(self, view: RankView) -> None:
        stuck = any(view.rank in verdict.ranks for verdict in self.verdicts)
        slow = view.rank in self.waiting.slow or view.rank in self._late
        view.update_health(stuck=stuck, slow=slow, stopped=self._stopped(view.rank))

    def _stopped(self, rank: int) -> bool:
        return self._ended_before_stop is not None and rank not in self._ended_before_stop and rank not in self._failed
