"""Turns the model of a run into updates for the page: the whole state first, then changes.

One `Updates` serves all browsers. A new browser gets `whole()`, the state as of the latest `next()`, and from then on
the results of `next()`, like all others.
"""

from __future__ import annotations

import shlex
from itertools import islice

import msgspec

from phalanx.contract import encoding
from phalanx.contract.run_metadata import RunMetadata
from phalanx.watch.model.events_timeline import TimelineEvent
from phalanx.watch.model.rank import RankView
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.series.curve import Curve, Point
from phalanx.watch.model.series.strip import TICK, Strip
from phalanx.watch.page.protocol import Head, PageUpdate, RankRow, TimelineEntry

SECONDS = 30.0  # seconds of phases in the whole state
_STRAGGLERS = 5


def encode(update: PageUpdate) -> bytes:
    """Return `update` in one line, as server-sent events require."""
    return encoding.encode(update)


class Updates:
    """Computes updates. `seconds`: duration of the phases in the whole state."""

    def __init__(self, model: RunModel, *, seconds: float = SECONDS) -> None:
        self._model = model
        self._seconds = seconds
        self._latest: PageUpdate | None = None  # without fields that are sent only once
        self._rows: dict[int, RankRow] = {}
        self._changes = -1  # those of the ranks that the rows contain
        self._ends: dict[int, float] = {}  # rank -> end of the letters sent
        self._given: dict[str, int] = {}  # curve -> number of points sent
        self._sent = 0  # events
        self._links: object = None
        self._metadata: RunMetadata | None = None

    def whole(self) -> PageUpdate:
        """Return the state as of the latest `next()`."""
        if self._latest is None:
            self.next()
        assert self._latest is not None  # noqa: S101
        new = len(self._model.timeline.since(self._sent))
        events = self._model.timeline.latest
        curves = self._all_curves()
        return msgspec.structs.replace(
            self._latest,
            rows=tuple(self._rows.values()),
            strips={
                rank: (end - TICK * len(letters), letters)
                for rank, end in self._ends.items()
                if (letters := self._back(rank, end))
            },
            curves={
                name: curve.points[: curve.before(given)]
                for name, given in self._given.items()
                if (curve := curves[name]).points
            },
            events=tuple(map(_entry, islice(events, len(events) - new))),
            metadata=self._metadata,
            **self._linked(),
        )

    @property
    def rows_changed(self) -> bool:
        """Whether a rank has changed since the last update with rows."""
        return self._model.ranks.changes != self._changes

    def next(self, *, rows: bool = True) -> PageUpdate | None:
        """Return the changes; None: nothing has changed. `rows`: also those of ranks. Of thousands this is slow."""
        model = self._model
        links = self._linked() if model.links is not self._links else {}
        self._links = model.links
        described = model.metadata if model.metadata is not self._metadata else None
        self._metadata = model.metadata
        changed, gone, strips = self._ranks() if rows and self.rows_changed else ((), (), {})
        latest = PageUpdate(
            at=model.now,
            head=_head(model),
            verdicts=tuple(map(_entry, model.problems.verdicts)),
            rendezvous=msgspec.to_builtins(model.run.rendezvous) if model.run.rendezvous is not None else None,
            stragglers=tuple(
                (one.rank, round(one.share, 3), one.phase) for one in model.stragglers.ranking()[:_STRAGGLERS]
            ),
        )
        curves = self._curves()
        events = model.timeline.since(self._sent)
        self._sent = model.timeline.counts.total()
        if latest == self._latest and not (changed or gone or strips or curves or events or links or described):
            return None
        self._latest = latest
        return msgspec.structs.replace(
            latest,
            rows=changed,
            gone=gone,
            strips=strips,
            curves=curves,
            events=tuple(map(_entry, events)),
            metadata=described,
            **links,
        )

    def _ranks(self) -> tuple[tuple[RankRow, ...], tuple[int, ...], dict[int, tuple[float, str]]]:
        """Return the changed rows, the ranks that are gone, and the new letters."""
        ranks, before = self._model.ranks, self._rows
        self._changes = ranks.changes
        self._rows = {rank: _row(view) for rank, view in ranks.items()}
        gone = tuple(rank for rank in before if rank not in self._rows)
        for rank in gone:
            self._ends.pop(rank, None)
        return tuple(row for rank, row in self._rows.items() if before.get(rank) != row), gone, self._strips()

    # -- what only grows

    def _strips(self) -> dict[int, tuple[float, str]]:
        new: dict[int, tuple[float, str]] = {}
        for rank, view in self._model.ranks.items():
            strip = view.activity.strip
            if not strip.letters:
                continue
            letters = self._after(strip, self._ends.get(rank))
            if letters:
                new[rank] = (round(strip.end - TICK * len(letters), 1), letters)
            self._ends[rank] = strip.end
        return new

    def _after(self, strip: Strip, end: float | None) -> str:
        most = round(self._seconds / TICK)
        if end is None or strip.end < end:  # a new strip, or the clock was set back
            return strip.letters[-most:]
        new = min(round((strip.end - end) / TICK), most)
        return strip.letters[-new:] if new else ""

    def _back(self, rank: int, end: float) -> str:
        """Return the letters of the seconds before `end`."""
        view = self._model.ranks.get(rank)
        if view is None:
            return ""
        strip = view.activity.strip
        return strip.between(max(end - self._seconds, strip.start), end)

    def _curves(self) -> dict[str, list[Point]]:
        new: dict[str, list[Point]] = {}
        for name, curve in self._all_curves().items():
            points = curve.points[curve.before(self._given.get(name, 0)) :]
            self._given[name] = curve.given
            if points:
                new[name] = points
        return new

    def _all_curves(self) -> dict[str, Curve]:
        return {**self._model.resources.curves, **self._model.progress.curves}

    def _linked(self) -> dict[str, object]:
        links = self._model.links
        if links is None:
            return {}
        pairs = tuple((link.one, link.other, link.latency, link.there, link.back) for link in links.pairs)
        return {"links": pairs, "measured": links.measured}


def _row(view: RankView) -> RankRow:
    shares = view.activity.shares
    return RankRow(
        rank=view.rank,
        node=view.location.node,
        host=view.location.host,
        device=view.location.device,
        pid=view.location.pid,
        health=view.health,
        phase=view.activity.phase,
        step=view.steps.last,
        rate=round(view.steps.rate, 3),
        samples=round(view.steps.samples, 1),
        data=round(shares.data, 2),
        compute=round(shares.compute, 2),
        waiting=round(shares.waiting, 2),
        cpu=round(view.usage.cpu, 2),
        memory=view.usage.memory,
        gpu=round(view.usage.gpu, 2),
        gpu_memory=view.usage.gpu_memory,
        silent=round(view.silent, 1),
        place=view.place,
    )


def _head(model: RunModel) -> Head:
    return Head(
        run=model.run.name,
        command=shlex.join(model.run.command),
        state=model.run.state,
        ending=model.run.words if model.run.ended is not None else "",
        started=model.run.started,
        now=model.now,
        ended=model.run.ended,
        code=model.run.code,
        world_size=model.ranks.world_size,
        nodes=model.ranks.nodes,
        generation=model.run.generation,
        attempt=model.run.attempt,
        step=model.progress.step,
        total=model.progress.total,
        epoch=model.progress.epoch,
        epochs=model.progress.epochs,
        rate=round(model.progress.rate, 4),
        samples=round(model.progress.samples, 2),
        goodput=round(model.goodput, 5),
        lost=round(model.lost, 2),
        eta=None if model.progress.eta is None or model.run.halted else round(model.progress.eta, 1),
    )


def _entry(event: TimelineEvent) -> TimelineEntry:
    return TimelineEntry(
        time=event.time,
        kind=event.kind,
        text=event.text,
        ranks=event.ranks,
        seconds=event.seconds,
    )
