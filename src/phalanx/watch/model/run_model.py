"""What is to be seen of a run: one event after the other is folded into it. Pure: time is what events say.

gathering    nodes come together (RollCall with somebody missing)
starting     ranks start: none of them has got beyond importing and joining
running
stalled      no rank goes on (Stalled, Verdict), until one does, or Resumed says so
recovering   after a fault that the run survives, until the first step after it (Recovered), all ranks are started
             again (Restarted), or a rank goes on
stopping     ranks are being ended
done, failed
"""

from __future__ import annotations

import math
import re
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
from phalanx.watch.model.waiting import Tally, WaitedFor

__all__ = ["KINDS", "SAMPLES", "STEPS", "Health", "RankView", "RunModel", "State", "TimelineEvent"]

State = Literal["gathering", "starting", "running", "stalled", "recovering", "stopping", "done", "failed"]

STEPS, SAMPLES = "steps/s", "samples/s"  # curves of our own
_MOST_CURVES = 100  # a script may make up names all day
_MOST_VERDICTS = 20
_BACK = 60.0  # seconds: a sight from so long ago means that the clock was set
_SETTLED = 3.0  # seconds: faces that nobody has added to are all there are
_TENTH = 0.15  # seconds, and some
_AGAIN = 600.0  # seconds until the same rank is told to be slow once more


@dataclass
class RunModel:
    run: str = ""
    command: tuple[str, ...] = ()
    state: State = "starting"
    started: float = 0.0
    now: float = 0.0  # of the last event
    ended: float | None = None
    code: int | None = None
    world_size: int = 0
    generation: int = 0
    attempt: int = 0
    step: int = -1  # the furthest; after a restart it may be less than before
    total: int = 0
    epoch: int = 0
    rate: float = 0.0  # steps a second
    samples: float = -1.0  # of all ranks, a second
    ranks: dict[int, RankView] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)  # loss, …, "steps/s", "samples/s"
    verdicts: list[TimelineEvent] = field(default_factory=list)  # that stand now
    roll: events.RollCall | None = None  # until everybody is here
    links: events.Links | None = None
    imports: events.ForkServerReady | None = None  # what the start was spent on
    cause: TimelineEvent | None = None  # why the run has failed: the first rank that did
    story: EventsTimeline = field(default_factory=EventsTimeline)
    losses: Goodput = field(default_factory=Goodput)
    times: dict[str, Histogram] = field(  # seconds of a step, of all ranks
        default_factory=lambda: {"data": Histogram(), "compute": Histogram(), "waiting": Histogram()}
    )
    tally: Tally = field(default_factory=Tally)
    _spares: set[int] = field(default_factory=set)  # pids
    _fallen: set[int] | None = None  # ranks that had ended before all were asked to; None: they were not
    _failed: set[int] = field(default_factory=set)  # ranks for which all were
    _late: set[int] = field(default_factory=set)  # ranks that were called slow in the end
    _named: dict[int, float] = field(default_factory=dict)  # when a rank was told to be slow
    _present: set[int] | None = None  # ranks, as the latest faces say
    _faced: float = 0.0  # when they have said it
    _furthest: int | None = None  # of the sight before, since the latest trouble
    _troubled: float = -math.inf  # when that was
    _pace: Rate = field(default_factory=Rate)
    _measured: events.MetricsMeasured | None = None  # the latest
    _measured_pace: Rate = field(default_factory=Rate)
    _restless: bool = False  # the training counts its steps from 0 again and again: those that were seen are better
    _usual: float = 0.0  # seconds a step

    @property
    def happenings(self) -> deque[TimelineEvent]:
        return self.story.latest

    @property
    def lost(self) -> float:
        """Seconds that faults and stalls have cost, those that last included."""
        return self.losses.total(self.now)

    @property
    def goodput(self) -> float:
        """Share of the time since the first step in which steps were made that counted: see losses.py."""
        return self.losses.goodput(self.now)

    @property
    def nodes(self) -> int:
        return len({view.node for view in self.ranks.values()})

    @property
    def left(self) -> float | None:
        """Seconds to go, where that is known."""
        if self.ended is not None or self._measured is None or self.total <= 0 or self.rate <= 0:
            return None
        return max(0, self.total - self._measured.step) / self.rate

    @property
    def held(self) -> list[WaitedFor]:
        """Who kept the others waiting in the last minute, the longest first."""
        return self.tally.held()

    def see(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.ClusterSample) and event.time < self.now - _BACK:
            self.now, self._troubled = event.time, -math.inf
        self.now = max(self.now, event.time)
        match event:
            case events.ClusterSample():
                self._sight(event)
            case events.MetricsMeasured():
                self._measure(event)
            case _:
                self._seldom(event, self.story.see(event))

    def _seldom(self, event: events.AnyEvent, told: TimelineEvent | None) -> None:
        match event:
            case events.RankInfos():
                self._faces(event)
            case events.WorkerBorn() | events.WorkerSeated() | events.WorkerExited():
                self._worker(event)
            case events.Stalled() | events.VerdictEvent() | events.Resumed():
                self._standstill(event, told)
            case events.FaultEvent() | events.Recovered() | events.Restarted() | events.WorkerFailed():
                self._fault(event)
            case events.RunEnded():
                self._ended(event)
            case events.RollCall():
                self._roll_call(event)
            case events.RunStarted():
                self.run, self.command, self.started = event.run, event.command, event.time
                self.world_size = event.world_size
            case events.AttemptStarted():
                self._attempt(event)
            case events.Stopping():
                self._become("stopping", unless=("recovering",))
                self._stop(event.time)
            case events.Preempted():
                self._become("stopping")
                self._stop(event.time)
            case events.StepTimingReport():
                self._paces(event)
            case events.ForkServerReady():
                self.imports = event
            case events.Links():
                self.links = event

    # -- all ranks, once a second

    def _sight(self, event: events.ClusterSample) -> None:
        self.generation = event.generation
        now, ranks, times = event.time, self.ranks, self.times
        furthest, samples, tells, coming, at_work = -1, 0.0, False, True, False
        for glance in event.ranks:
            view = ranks.get(glance.rank) or self._view(glance.rank)
            view.glance(now, event.seconds, glance, times)
            furthest = max(furthest, glance.step)
            at_work = at_work or (not view.gone and glance.phases.strip(events.UNSEEN) != "")
            if glance.samples >= 0:
                samples, tells = samples + glance.samples, True
            if coming and not view.gone and (glance.step >= 0 or view.phase not in ("import", "join")):
                coming = False
        if not coming and self.state in ("starting", "gathering") and now >= self._troubled:
            self._become("running")
            if self.step < 0:  # nobody sees its steps, so that is all that can be waited for
                self.losses.settle(now)
        self._steps(now, furthest)
        self._throughput(now, samples if tells else -1.0, at_work=at_work)
        if self.state == "running":
            self._prune(now)
            self.tally.see(now, {glance.rank: glance.phases[-50:] for glance in event.ranks if glance.phases})
            self._tell_slow(now)
        if len(event.ranks) < len(ranks):
            self._missed(event)
        self._judge()

    def _missed(self, event: events.ClusterSample) -> None:
        """Whoever is not in the sight is silent."""
        for view in self.ranks.values():
            if view.seen and view.seen != event.time and not view.gone:
                view.silent = max(view.silent, event.time - view.seen)

    def _steps(self, now: float, furthest: int) -> None:
        """A sight may be from before the trouble that was told a moment ago, and then says nothing about it."""
        if furthest >= 0:
            self.step = furthest
            self._pace.see(now, furthest)
            if self.losses.first is None:
                self.losses.first = now
        if now >= self._troubled:
            if self._furthest is not None and furthest > self._furthest:
                self._goes_on(now)
            self._furthest = furthest

    def _throughput(self, now: float, samples: float, *, at_work: bool) -> None:
        told = self._measured.samples if self._measured is not None else -1.0
        self.rate = self._pace.at(now) or self._measured_pace.at(now)
        self.samples = samples if samples >= 0 else told
        if self.state in ("stalled", "recovering"):  # what was told last is not true any more
            self.samples = min(0.0, self.samples)
            for view in self.ranks.values():
                view.samples = min(0.0, view.samples)
        self._usual = self._pace.each or self._measured_pace.each or self._usual
        halted = self.state in ("stalled", "recovering")
        if self.step >= 0 and (at_work or halted):  # that it ends makes it no slower
            if self.rate > 0 or halted:  # else it is not known yet
                self._point(STEPS, self.step, now, self.rate)
            if self.samples >= 0:
                self._point(SAMPLES, self.step, now, self.samples)

    def _goes_on(self, when: float) -> None:
        """A step was made: whatever it was, it is over."""
        self.verdicts.clear()
        self.roll = None
        self.losses.stepped(when)
        self._become("running", only=("gathering", "starting", "stalled", "recovering"))

    def _tell_slow(self, now: float) -> None:
        """Once in a while, and of several that are slow at once in one line."""
        if not any(self._is_news(rank, now) for rank in self.tally.slow):
            return
        slow = [one for one in self.tally.held() if one.rank in self.tally.slow]
        also = f", and {len(slow) - 1} more did" if len(slow) > 1 else ""
        ranks = tuple(one.rank for one in slow)
        self._named |= dict.fromkeys(ranks, now)
        self.story.tell(now, "slow", slow[0].sentence(self.tally.seconds) + also, ranks, slow[0].seconds)

    def _is_news(self, rank: int, now: float) -> bool:
        return not 0 <= now - self._named.get(rank, -math.inf) < _AGAIN

    # -- what a training tells

    def _measure(self, event: events.MetricsMeasured) -> None:
        before, self._measured = self._measured, event
        more = before is None or event.step > before.step
        self._restless = self._restless or (before is not None and event.step < before.step and self.state == "running")
        self.total, self.epoch = event.total or self.total, event.epoch
        self._measured_pace.see(event.time, event.step)
        if more and event.time >= self._troubled and self.state != "recovering":  # then it may be from before
            self._goes_on(event.time)
        if not self._pace.marks:  # nobody sees its steps
            self.step, self.rate, self.samples = event.step, self._measured_pace.at(event.time), event.samples
        step = self.step if self._restless else event.step
        for name, value in event.values.items():
            if value is not None and name not in (STEPS, SAMPLES):
                self._point(name, step, event.time, value)

    def _point(self, name: str, step: int, when: float, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < _MOST_CURVES:
            curve = self.curves[name] = Curve()
        if curve is not None and math.isfinite(value):
            curve.add(step, when, value)

    # -- who is there

    def _view(self, rank: int) -> RankView:
        return self.ranks.setdefault(rank, RankView(rank))

    def _faces(self, event: events.RankInfos) -> None:
        if not event.ranks:  # between two attempts: they will be back
            return
        self._present = {face.rank for face in event.ranks}
        known = {(face.host, face.pid) for face in event.ranks}
        moved = [r for r in self.ranks.keys() - self._present if (self.ranks[r].host, self.ranks[r].pid) in known]
        for rank in moved:  # its process has another rank now
            del self.ranks[rank]
        self.world_size = len(self._present) if moved else max(self.world_size, len(self._present))
        for face in event.ranks:
            self._view(face.rank).sits(face)
        self._faced = event.time
        self._judge()

    def _prune(self, now: float) -> None:
        """Ranks that are no more. When they start, or come together again, not all of them have a face at first."""
        if self._present is not None and now - self._faced >= _SETTLED:
            self.world_size = len(self._present)
            for rank in self.ranks.keys() - self._present:
                del self.ranks[rank]

    def _worker(self, event: events.WorkerBorn | events.WorkerSeated | events.WorkerExited) -> None:
        match event:
            case events.WorkerBorn(spare=True):
                self._spares.add(event.pid)
                return
            case events.WorkerBorn():
                view = self._view(event.rank)
                view.device = view.device or event.device
                view.born(event.pid)
            case events.WorkerSeated():
                self._spares.discard(event.pid)
                before = self.ranks.get(event.was)
                if before is not None and before.pid == event.pid:
                    before.born(0)
                view = self._view(event.rank)
                view.born(event.pid)
            case events.WorkerExited():
                if event.pid in self._spares:
                    self._spares.discard(event.pid)
                    return
                view = self._view(event.rank)
                if view.pid not in (0, event.pid):  # another has its place already
                    return
                view.ended(event.time, event.code)
        self._judge_one(view)

    def _roll_call(self, event: events.RollCall) -> None:
        before = self.roll.here if self.roll is not None else event.here[:1]
        new = list((Counter(event.here) - Counter(before)).elements())  # two may have the same name
        if new:
            shown = ", ".join(new[:4]) + (f" and {len(new) - 4} more" if len(new) > 4 else "")
            self.story.tell(event.time, "joined", f"{shown}: {len(event.here)} of {event.expected} nodes are here")
        missing = bool(event.missing) or len(event.here) < event.expected
        self.roll = event if missing else None
        if missing:
            self._become("gathering", only=("starting",))
        else:
            self._become("starting", only=("gathering",))

    def _attempt(self, event: events.AttemptStarted) -> None:
        if event.attempt > self.attempt:
            for view in self.ranks.values():
                view.born(0)
        self.attempt, self._fallen = event.attempt, None
        self._failed.clear()
        self.roll, self._measured, self._furthest, self._troubled = None, None, None, event.time
        self.verdicts.clear()
        self._become("starting", only=("gathering", "recovering", "running", "stalled"))
        self._judge()

    # -- trouble

    def _standstill(
        self, event: events.Stalled | events.VerdictEvent | events.Resumed, told: TimelineEvent | None
    ) -> None:
        match event:
            case events.Stalled():
                self.verdicts.clear()  # new ones follow
                self.losses.begin(event.time - max(0.0, event.seconds))
                self._trouble("stalled", event.time)
            case events.VerdictEvent():
                self.losses.begin(event.time)
                self._trouble("stalled", event.time)
                self.verdicts += [told] if told is not None else []
                del self.verdicts[:-_MOST_VERDICTS]
            case events.Resumed():
                self.verdicts.clear()
                self.losses.told(event.seconds)
                self._become("running", only=("stalled",))
        self._judge()

    def _fault(self, event: events.FaultEvent | events.Recovered | events.Restarted | events.WorkerFailed) -> None:
        match event:
            case events.FaultEvent(recovery="stop"):
                self._failed.add(event.rank)
                self._become("stopping")
            case events.FaultEvent():
                if self.state == "stalled":
                    self.losses.settle(event.time)
                self.losses.begin(event.time)
                self._trouble("recovering", event.time)
            case events.Recovered():
                self.generation = max(self.generation, event.generation)
                self._measured = None  # steps may be done again
                self.losses.told(event.seconds)
                self.losses.add(max(0, event.redone) * self._usual)
                self.verdicts.clear()
                self._become("running", only=("recovering", "starting", "stalled"))
            case events.Restarted():
                self.losses.told(event.seconds)
                self.losses.begin(event.time)
                self.verdicts.clear()
                self._become("starting", only=("recovering", "running", "stalled"))
            case events.WorkerFailed():
                self.cause = TimelineEvent(event.time, "fault", event.summary, (event.rank,))
                self._failed.add(event.rank)
        self._judge()

    def _trouble(self, state: State, when: float) -> None:
        self._become(state, unless=("stopping",))
        self._furthest, self._troubled = None, when
        self.tally.clear()

    def _paces(self, event: events.StepTimingReport) -> None:
        self._late.clear()
        for text in event.late:
            named = re.match(r"rank (\d{1,9})\b", text)
            ranks = (int(named[1]),) if named else ()
            self._late.update(ranks)
            self.story.tell(event.time, "slow", text, ranks)
        self._judge()

    # -- the end

    def _ended(self, event: events.RunEnded) -> None:
        self.losses.settle(event.time)
        self._become("failed" if event.code else "done")
        self.ended, self.code, self.roll = event.time, event.code, None
        self.rate = 1 / self._usual if self._usual else 0.0
        self.samples = self.curves[SAMPLES].last or 0.0 if SAMPLES in self.curves else self.samples
        for view in self.ranks.values():
            if view.code is None:  # of other nodes nobody says how they ended
                view.ended(event.time, 0 if event.code == 0 else None)
            view.rests()
        self._judge()

    def _stop(self, when: float) -> None:
        """A sight is of a tenth of a second, and may stand before what happened in it."""
        if self._fallen is None:
            gone = [view for view in self.ranks.values() if view.gone]
            self._fallen = {view.rank for view in gone if view.code is not None or view.since < when - _TENTH}

    def _become(self, state: State, *, only: tuple[State, ...] = (), unless: tuple[State, ...] = ()) -> None:
        if self.ended is None and (not only or self.state in only) and self.state not in unless:
            self.state = state

    def _judge(self) -> None:
        stuck = {rank for verdict in self.verdicts for rank in verdict.ranks}
        slow = self.tally.slow | self._late if self._late else self.tally.slow
        for rank, view in self.ranks.items():
            view.judge(stuck=rank in stuck, slow=rank in slow, stopped=self._stopped(rank))

    def _judge_one(self, view: RankView) -> None:
        stuck = any(view.rank in verdict.ranks for verdict in self.verdicts)
        slow = view.rank in self.tally.slow or view.rank in self._late
        view.judge(stuck=stuck, slow=slow, stopped=self._stopped(view.rank))

    def _stopped(self, rank: int) -> bool:
        return self._fallen is not None and rank not in self._fallen and rank not in self._failed
