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
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from phalanx.contract import events
from phalanx.watch.curve import Curve
from phalanx.watch.histogram import Histogram
from phalanx.watch.losses import Losses
from phalanx.watch.rank import Health, RankView
from phalanx.watch.rate import Rate
from phalanx.watch.story import KINDS, Happening, Story
from phalanx.watch.waiting import Held, Tally

__all__ = ["KINDS", "Happening", "Health", "RankView", "Scene", "State"]

State = Literal["gathering", "starting", "running", "stalled", "recovering", "stopping", "done", "failed"]

_MOST_CURVES = 100  # a script may make up names all day
_MOST_VERDICTS = 20
_BACK = 60.0  # seconds: a sight from so long ago means that the clock was set
_AGAIN = 600.0  # seconds until the same rank is told to be slow once more
_ECHOES = ("; regrouped, and step ", "starting all ranks again")  # notes of what was told by an event just before
_STEPS, _SAMPLES = "steps/s", "samples/s"


@dataclass
class Scene:
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
    verdicts: list[Happening] = field(default_factory=list)  # that stand now
    roll: events.RollCall | None = None  # until everybody is here
    links: events.Links | None = None
    imports: events.ZygoteReady | None = None  # what the start was spent on
    cause: Happening | None = None  # why the run has failed: the first rank that did
    story: Story = field(default_factory=Story)
    losses: Losses = field(default_factory=Losses)
    times: dict[str, Histogram] = field(  # seconds of a step, of all ranks
        default_factory=lambda: {"data": Histogram(), "compute": Histogram(), "waiting": Histogram()}
    )
    tally: Tally = field(default_factory=Tally)
    _spares: set[int] = field(default_factory=set)  # pids
    _late: set[int] = field(default_factory=set)  # ranks that were called slow in the end
    _named: dict[int, float] = field(default_factory=dict)  # when a rank was told to be slow
    _furthest: int | None = None  # of the sight before, since the latest trouble
    _committed: tuple[int, int | None] | None = None  # the step that was told last, and what was seen just after it
    _redo: int | None = None  # the step before a restart
    _pace: Rate = field(default_factory=Rate)
    _told_pace: Rate = field(default_factory=Rate)
    _told_samples: float = -1.0
    _usual: float = 0.0  # seconds a step

    @property
    def happenings(self) -> deque[Happening]:
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
        if self.ended is not None or self.total <= 0 or self.rate <= 0 or self.step < 0:
            return None
        return max(0, self.total - self.step) / self.rate

    @property
    def held(self) -> list[Held]:
        """Who kept the others waiting in the last minute, the longest first."""
        return self.tally.held()

    def see(self, event: events.AnyEvent) -> None:
        set_back = isinstance(event, events.Sight) and event.time < self.now - _BACK
        self.now = event.time if set_back else max(self.now, event.time)
        match event:
            case events.Sight():
                self._sight(event)
            case events.Measured():
                self._measured(event)
            case events.Faces():
                self._faces(event)
            case events.WorkerBorn() | events.WorkerSeated() | events.WorkerExited():
                self._worker(event)
            case events.Stalled() | events.Verdict() | events.Resumed():
                self._standstill(event)
            case events.Fault() | events.Recovered() | events.Restarted() | events.WorkerFailed():
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
                if self.state == "stopping" and not self.story.has("fault", event.reason):
                    self._note(event.time, f"stopping ({event.signal}): {event.reason}")
            case events.Preempted():
                self._become("stopping")
                text = f"preempted: step {event.step} is in a checkpoint, {event.seconds:.1f} s after it was asked for"
                self.story.tell(event.time, "preempted", text, seconds=event.seconds)
            case events.Paces():
                self._paces(event)
            case events.Note():
                self._note(event.time, event.text)
            case events.StoreLost():
                self._note(event.time, f"the store process has ended (code {event.code})")
            case events.ZygoteReady():
                self.imports = event
            case events.Links():
                self.links = event
            case events.ZygoteRefused():
                pass  # a note says it

    # -- all ranks, once a second

    def _sight(self, event: events.Sight) -> None:
        self.generation = event.generation
        now, ranks, times, seconds = event.time, self.ranks, self.times, max(0.0, event.seconds)
        furthest, samples, tells, coming = -1, 0.0, False, True
        for glance in event.ranks:
            view = ranks.get(glance.rank) or self._view(glance.rank)
            view.glance(now, seconds, glance, times)
            furthest = max(furthest, glance.step)
            if glance.samples >= 0:
                samples, tells = samples + glance.samples, True
            if coming and (glance.step >= 0 or view.phase not in ("import", "join")) and glance.state != "X":
                coming = False
        if len(event.ranks) < len(ranks):
            self._missed(event)
        if not coming:
            self._become("running", only=("starting", "gathering"))
        self._steps(now, furthest)
        self._throughput(now, furthest >= 0, samples if tells else -1.0)
        if self.state == "running":
            self.tally.see(now, {glance.rank: glance.phases[-50:] for glance in event.ranks})
            self._tell_slow(now)
        self._judge()

    def _missed(self, event: events.Sight) -> None:
        """Whoever is not in the sight is silent."""
        for view in self.ranks.values():
            if view.seen and view.seen != event.time and not view.gone:
                view.silent = max(view.silent, event.time - view.seen)

    def _steps(self, now: float, furthest: int) -> None:
        if furthest >= 0:
            self._pace.see(now, furthest)
            if self._furthest is not None and furthest > self._furthest:
                self._goes_on(now)
            elif furthest > 0 and self.losses.first is None:
                self.losses.stepped(now)
            self._furthest = furthest
        if self._committed is None:
            self.step = furthest if furthest >= 0 else self.step
            return
        # Optimizers count from where a process began, and the training from its first step ever. The training is
        # right; between two of its words what was seen goes on from there.
        step, then = self._committed
        if then is None or furthest < then:
            self._committed = (step, furthest)
        else:
            self.step = max(self.step, step + furthest - then)

    def _throughput(self, now: float, seen: bool, samples: float) -> None:
        self.rate = (self._pace if seen else self._told_pace).at(now)
        stands = self.state in ("stalled", "recovering", "stopping")
        self.samples = samples if samples >= 0 else min(0.0, self._told_samples) if stands else self._told_samples
        if self.state == "running" and self.rate > 0:
            self._usual = 1 / self.rate
        if self.step >= 0:
            self._point(_STEPS, self.step, now, self.rate)
            if self.samples >= 0:
                self._point(_SAMPLES, self.step, now, self.samples)

    def _goes_on(self, when: float) -> None:
        """A rank has made a step: whatever it was, it is over."""
        self.verdicts.clear()
        self.roll = None
        self.losses.stepped(when)
        self._become("running", only=("gathering", "starting", "stalled", "recovering"))

    def _tell_slow(self, now: float) -> None:
        for rank in sorted(self.tally.slow):
            if not 0 <= now - self._named.get(rank, -math.inf) < _AGAIN:
                self._named[rank] = now
                held = next(one for one in self.tally.held() if one.rank == rank)
                self.story.tell(now, "slow", held.sentence(), (rank,), held.seconds)

    # -- what a training tells

    def _measured(self, event: events.Measured) -> None:
        if self._redo is not None:
            self.losses.add(max(0, self._redo - event.step) * self._usual)
            self._redo = None
        more = self._committed is None or event.step > self._committed[0]
        if self.state in ("starting", "gathering", "running") or (self.state == "stalled" and more):
            self._goes_on(event.time)
        self._committed, self.step = (event.step, None), event.step
        self.total, self.epoch, self._told_samples = event.total or self.total, event.epoch, event.samples
        self._told_pace.see(event.time, event.step)
        if self._furthest is None or self._furthest < 0:
            self.rate, self.samples = self._told_pace.at(event.time), event.samples
        for name, value in event.values.items():
            if value is not None:
                self._point(name, event.step, event.time, value)

    def _point(self, name: str, step: int, when: float, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < _MOST_CURVES:
            curve = self.curves[name] = Curve()
        if curve is not None and math.isfinite(value):
            curve.add(step, when, value)

    # -- who is there

    def _view(self, rank: int) -> RankView:
        return self.ranks.setdefault(rank, RankView(rank))

    def _faces(self, event: events.Faces) -> None:
        if not event.ranks:  # between two attempts: they will be back
            return
        self.world_size = len(event.ranks)
        for face in event.ranks:
            self._view(face.rank).sits(face)
        for rank in self.ranks.keys() - {face.rank for face in event.ranks}:
            del self.ranks[rank]
        self._judge()

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
                view = self._view(event.rank)
                view.born(event.pid)
            case events.WorkerExited():
                if event.pid in self._spares:
                    self._spares.discard(event.pid)
                    return
                view = self._view(event.rank)
                if view.pid not in (0, event.pid):  # another has its place already
                    return
                view.ended(event.code)
        self._judge_one(view)

    def _roll_call(self, event: events.RollCall) -> None:
        before = self.roll.here if self.roll is not None else event.here[:1]
        new = [name for name in event.here if name not in before]
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
            self._redo = self._committed[0] if self._committed is not None else None
            for view in self.ranks.values():
                view.born(0)
        self.attempt = event.attempt
        self.roll, self._committed, self._furthest = None, None, None
        self.verdicts.clear()
        self._become("starting", only=("gathering", "recovering", "running", "stalled"))
        self._judge()

    # -- trouble

    def _standstill(self, event: events.Stalled | events.Verdict | events.Resumed) -> None:
        match event:
            case events.Stalled():
                self.verdicts.clear()  # new ones follow
                self.losses.begin(event.time - max(0.0, event.seconds))
                self._trouble("stalled")
                self.story.tell(event.time, "stalled", f"no rank goes on, for {event.seconds:.0f} s", (), event.seconds)
            case events.Verdict():
                self.losses.begin(event.time)
                self._trouble("stalled")
                self.verdicts.append(self.story.tell(event.time, "verdict", event.text, event.ranks))
                del self.verdicts[:-_MOST_VERDICTS]
            case events.Resumed():
                self.verdicts.clear()
                self.losses.told(event.seconds)
                self._become("running", only=("stalled",))
                self.story.tell(event.time, "resumed", f"goes on after {event.seconds:.0f} s", (), event.seconds)
        self._judge()

    def _fault(self, event: events.Fault | events.Recovered | events.Restarted | events.WorkerFailed) -> None:
        match event:
            case events.Fault():
                known = event.reason.startswith(("rank ", "node ", "the "))
                text = event.reason if known else f"rank {event.rank}: {event.reason}"
                self.story.tell(event.time, "fault", text, (event.rank,))
                if event.recovery == "stop":
                    self._become("stopping")
                    return
                if self.state == "stalled":
                    self.losses.settle(event.time)
                self.losses.begin(event.time)
                self._trouble("recovering")
            case events.Recovered():
                self.generation = max(self.generation, event.generation)
                self.losses.told(event.seconds)
                self.losses.add(max(0, event.redone) * self._usual)
                self.verdicts.clear()
                self._become("running", only=("recovering", "starting", "stalled"))
                redone = f"{event.redone} steps done again" if event.redone > 1 else "1 step done again"
                cost = redone if event.redone > 0 else "no step lost"
                text = f"recovered in {event.seconds:.2f} s: step {event.step} is committed, {cost}"
                self.story.tell(event.time, "recovered", text, (), event.seconds)
                self._judge()
            case events.Restarted():
                self.losses.told(event.seconds)
                self.losses.begin(event.time)
                self.verdicts.clear()
                self._become("starting", only=("recovering", "running", "stalled"))
                text = f"all ranks are started again, {event.seconds:.2f} s after the fault"
                self.story.tell(event.time, "restarted", text, (), event.seconds)
                self._judge()
            case events.WorkerFailed():
                self.cause = Happening(event.time, "fault", event.summary, (event.rank,))
                if not self.story.has("fault", event.summary):
                    self.story.tell(event.time, "fault", event.summary, (event.rank,))

    def _trouble(self, state: State) -> None:
        self._become(state, unless=("stopping",))
        self._furthest = None
        self.tally.clear()

    def _paces(self, event: events.Paces) -> None:
        self._late.clear()
        for text in event.late:
            named = re.match(r"rank (\d{1,9})\b", text)
            ranks = (int(named[1]),) if named else ()
            self._late.update(ranks)
            self.story.tell(event.time, "slow", text, ranks)
        self._judge()

    def _note(self, when: float, text: str) -> None:
        if not any(echo in text for echo in _ECHOES):
            self.story.note(when, text)

    # -- the end

    def _ended(self, event: events.RunEnded) -> None:
        self.losses.settle(event.time)
        self._become("failed" if event.code else "done")
        self.ended, self.code, self.roll, self.rate = event.time, event.code, None, 0.0
        how = f"ended with code {event.code}" if event.code else "done"
        self.story.tell(event.time, "end", f"{how}, after {event.seconds:.0f} s", (), event.seconds)
        for view in self.ranks.values():
            if view.code is None:  # of other nodes nobody says how they ended
                view.ended(0 if event.code == 0 else None)
        self._judge()

    def _become(self, state: State, *, only: tuple[State, ...] = (), unless: tuple[State, ...] = ()) -> None:
        if self.ended is None and (not only or self.state in only) and self.state not in unless:
            self.state = state

    def _judge(self) -> None:
        stuck = {rank for verdict in self.verdicts for rank in verdict.ranks}
        slow = self.tally.slow | self._late if self._late else self.tally.slow
        for rank, view in self.ranks.items():
            view.judge(stuck=rank in stuck, slow=rank in slow)

    def _judge_one(self, view: RankView) -> None:
        stuck = any(view.rank in verdict.ranks for verdict in self.verdicts)
        view.judge(stuck=stuck, slow=view.rank in self.tally.slow or view.rank in self._late)
