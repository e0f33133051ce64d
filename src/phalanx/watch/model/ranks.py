"""All ranks of a run: which exist, which have ended, and the health of each."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass

from phalanx.contract import events
from phalanx.watch.model.rank import STARTING, RankView
from phalanx.watch.model.series import strip
from phalanx.watch.model.series.histogram import Histogram
from phalanx.watch.model.status import STOPPED

_SETTLED = 3.0  # seconds after which a RankInfos event is complete
_TENTH = 0.15  # seconds: a little more than one tick of a sample


@dataclass(frozen=True)
class SampleSummary:
    """What a sample contains about all ranks together."""

    furthest: int  # the highest step; -1: none is known
    samples: float  # training samples per second; -1: unknown
    starting: bool  # all live ranks are still importing or joining
    at_work: bool  # some rank is running


class RankViews(Mapping[int, RankView]):
    """The ranks by number. Call `apply` with each event, `sampled` with each sample."""

    def __init__(self) -> None:
        self.world_size = 0
        self.times = {"data": Histogram(), "compute": Histogram(), "waiting": Histogram()}  # seconds per step
        self.changes = 0  # counts changes of any rank, so that viewers need not compare all of them
        self._views: dict[int, RankView] = {}
        self._attempt = 0
        self._spares: set[int] = set()  # pids
        self._present: set[int] | None = None  # ranks of the latest RankInfos
        self._infos_time = 0.0  # its time
        self._ended_before_stop: set[int] | None = None  # ranks; None: the run is not being stopped
        self._failed: set[int] = set()  # ranks whose failure stopped the run
        self._by_user = False  # the run was stopped by Ctrl-C or `phalanx stop`

    def __getitem__(self, rank: int) -> RankView:
        return self._views[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def values(self) -> ValuesView[RankView]:
        """Return all ranks."""
        return self._views.values()

    def items(self) -> ItemsView[int, RankView]:
        """Return all ranks with their numbers."""
        return self._views.items()

    @property
    def nodes(self) -> int:
        """The number of nodes that have ranks."""
        return len({view.location.node for view in self._views.values()})

    # -- samples

    def sampled(self, event: events.ClusterSample) -> SampleSummary:
        """Fold a sample."""
        now, views, times = event.time, self._views, self.times
        furthest, samples, known, starting, at_work = -1, 0.0, False, True, False
        self.changes += 1
        room = strip.room(len(views))
        for sample in event.ranks:
            view = views.get(sample.rank) or self._view(sample.rank)
            view.apply(now, event.seconds, sample, times)
            view.activity.strip.shorten(room)
            furthest = max(furthest, sample.step)
            at_work = at_work or (not view.gone and sample.phases.strip(events.UNSEEN) != "")
            if sample.samples >= 0:
                samples, known = samples + sample.samples, True
            if starting and not view.gone and (sample.step >= 0 or view.activity.phase not in STARTING):
                starting = False
        return SampleSummary(furthest, samples if known else -1.0, starting, at_work)

    def mark_missing(self, event: events.ClusterSample) -> None:
        """Mark ranks that are not in the sample as silent."""
        if len(event.ranks) < len(self._views):
            for view in self._views.values():
                if view.sampled and view.sampled != event.time and not view.gone:
                    view.silent = max(view.silent, event.time - view.sampled)

    def halt(self) -> None:
        """Record that training is halted: the latest reported rates are out of date."""
        for view in self._views.values():
            view.steps.samples = min(0.0, view.steps.samples)

    def prune(self, now: float) -> None:
        """Remove ranks that no longer exist. During a start or a regroup, RankInfos is incomplete at first."""
        if self._present is not None and now - self._infos_time >= _SETTLED:
            self.world_size = len(self._present)
            for rank in self._views.keys() - self._present:
                del self._views[rank]

    # -- other events

    def apply(self, event: events.AnyEvent) -> None:
        """Fold an event that is neither a sample nor about one worker."""
        match event:
            case events.RunStarted():
                self.world_size = event.world_size
            case events.RankInfos():
                self._rank_infos(event)
            case events.AttemptStarted():
                if event.attempt > self._attempt:
                    self.changes += 1
                    for view in self._views.values():
                        view.start(0)
                self._attempt, self._ended_before_stop = event.attempt, None
                self._failed.clear()
                self._by_user = False
            case events.FaultEvent(recovery="stop") | events.WorkerFailed():
                self._failed.add(event.rank)
            case events.Stopping() | events.Preempted():
                self._stop(event.time)
                # A failure stops the others by SIGTERM.
                self._by_user = isinstance(event, events.Stopping) and event.signal == "SIGINT"
            case events.RunEnded():
                self.changes += 1
                self._by_user = event.preempted or (event.code in STOPPED and not self._failed)
                for view in self._views.values():
                    if view.code is None:  # exit codes of other nodes are not known
                        view.end(event.time, 0 if event.code == 0 else None)
                    view.steps.freeze_rate()

    def worker(self, event: events.WorkerStarted | events.RankChanged | events.WorkerExited) -> RankView | None:
        """Fold an event about one worker. Return its rank, or None if that has not changed."""
        self.changes += 1
        match event:
            case events.WorkerStarted(spare=True):
                self._spares.add(event.pid)
                return None
            case events.WorkerStarted():
                view = self._view(event.rank)
                view.location.device = view.location.device or event.device
                view.start(event.pid)
            case events.RankChanged():
                self._spares.discard(event.pid)
                before = self._views.get(event.previous_rank)
                if before is not None and before.location.pid == event.pid:
                    before.start(0)
                view = self._view(event.rank)
                view.start(event.pid)
            case events.WorkerExited():
                if event.pid in self._spares:
                    self._spares.discard(event.pid)
                    return None
                view = self._view(event.rank)
                if view.location.pid not in (0, event.pid):  # a replacement already has the rank
                    return None
                view.end(event.time, event.code)
        return view

    def update_health(self, stuck: set[int], slow: set[int], view: RankView | None = None) -> None:
        """Judge all ranks, or only one. `stuck` and `slow` are ranks."""
        for each in self._views.values() if view is None else (view,):
            rank = each.rank
            stopped = self._was_stopped(rank)
            by_user = stopped and self._by_user
            before = each.health
            each.update_health(stuck=rank in stuck, slow=rank in slow, stopped=stopped, by_user=by_user)
            self.changes += each.health != before

    def _view(self, rank: int) -> RankView:
        return self._views.setdefault(rank, RankView(rank))

    def _rank_infos(self, event: events.RankInfos) -> None:
        infos = list(event.each())
        if not infos:  # between two attempts
            return
        self.changes += 1
        self._present = {info.rank for _, info in infos}
        known = {(node.host, info.pid) for node, info in infos}
        moved = [
            rank
            for rank, view in self._views.items()
            if rank not in self._present and (view.location.host, view.location.pid) in known
        ]
        for rank in moved:  # the process has another rank now
            del self._views[rank]
        self.world_size = len(self._present) if moved else max(self.world_size, len(self._present))
        for node, info in infos:
            self._view(info.rank).place_at(node, info)
        self._infos_time = event.time

    def _stop(self, when: float) -> None:
        """Record which ranks had ended before the stop. A sample may be a tenth of a second older than its events."""
        if self._ended_before_stop is None:
            self._ended_before_stop = {
                rank
                for rank, view in self._views.items()
                if view.exit is not None and (view.code is not None or view.exit.time < when - _TENTH)
            }

    def _was_stopped(self, rank: int) -> bool:
        return self._ended_before_stop is not None and rank not in self._ended_before_stop and rank not in self._failed
