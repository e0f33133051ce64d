"""A scene as the page is told of it: all of it once, then what has changed.

One `Updates` serves all clients: whoever comes gets `whole()`, which is as of the latest `next()`, and from then on
what `next()` gives, as everybody does.
"""

from __future__ import annotations

import shlex
from itertools import islice

import msgspec

from phalanx.contract import encoding
from phalanx.watch.model.curve import Point
from phalanx.watch.model.rank import RankView
from phalanx.watch.model.run_model import RunModel, TimelineEvent
from phalanx.watch.model.strip import TICK, Strip
from phalanx.watch.page.protocol import Head, PageUpdate, RankRow, Told

SECONDS = 30.0  # of phases, in a whole
_HELD = 5  # ranks that others waited for


def encode(update: PageUpdate) -> bytes:
    """In one line, as server-sent events want it."""
    return encoding.encode(update)


class Updates:
    """`seconds`: of phases, that a whole has."""

    def __init__(self, scene: RunModel, *, seconds: float = SECONDS) -> None:
        self._scene = scene
        self._seconds = seconds
        self._latest: PageUpdate | None = None  # with all that is told each time, and nothing that is told once
        self._rows: dict[int, RankRow] = {}
        self._ends: dict[int, float] = {}  # how far the strips were told
        self._given: dict[str, int] = {}  # how far the curves were told
        self._told = 0
        self._links: object = None

    def whole(self) -> PageUpdate:
        """What all updates so far come to; the first one looks at the scene."""
        if self._latest is None:
            self.next()
        assert self._latest is not None  # noqa: S101
        new = len(self._scene.story.since(self._told))
        happenings = self._scene.happenings
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
                if (curve := self._scene.curves[name]).points
            },
            told=tuple(map(_told, islice(happenings, len(happenings) - new))),
            **self._linked(),
        )

    def next(self) -> PageUpdate | None:
        """What is new; None: nothing."""
        scene = self._scene
        links = self._linked() if scene.links is not self._links else {}
        self._links = scene.links
        rows = {rank: _row(view) for rank, view in scene.ranks.items()}
        before, self._rows = self._rows, rows
        gone = tuple(rank for rank in before if rank not in rows)
        for rank in gone:
            self._ends.pop(rank, None)
        latest = PageUpdate(
            at=scene.now,
            head=_head(scene),
            verdicts=tuple(map(_told, scene.verdicts)),
            roll=msgspec.to_builtins(scene.roll) if scene.roll is not None else None,
            held=tuple((one.rank, round(one.share, 3), one.phase) for one in scene.held[:_HELD]),
        )
        strips = self._strips()
        curves = self._curves()
        told = scene.story.since(self._told)
        self._told = scene.story.counts.total()
        if latest == self._latest and before == rows and not (gone or strips or curves or told or links):
            return None
        self._latest = latest
        return msgspec.structs.replace(
            latest,
            rows=tuple(row for rank, row in rows.items() if before.get(rank) != row),
            gone=gone,
            strips=strips,
            curves=curves,
            told=tuple(map(_told, told)),
            **links,
        )

    # -- what only ever gets longer

    def _strips(self) -> dict[int, tuple[float, str]]:
        new: dict[int, tuple[float, str]] = {}
        for rank, view in self._scene.ranks.items():
            strip = view.strip
            if not strip.letters:
                continue
            letters = self._after(strip, self._ends.get(rank))
            if letters:
                new[rank] = (round(strip.end - TICK * len(letters), 1), letters)
            self._ends[rank] = strip.end
        return new

    def _after(self, strip: Strip, end: float | None) -> str:
        most = round(self._seconds / TICK)
        if end is None or strip.end < end:  # a new one, or the clock was set back
            return strip.letters[-most:]
        new = min(round((strip.end - end) / TICK), most)
        return strip.letters[-new:] if new else ""

    def _back(self, rank: int, end: float) -> str:
        """The letters of the last seconds before that."""
        view = self._scene.ranks.get(rank)
        return view.strip.between(max(end - self._seconds, view.strip.start), end) if view is not None else ""

    def _curves(self) -> dict[str, list[Point]]:
        new: dict[str, list[Point]] = {}
        for name, curve in self._scene.curves.items():
            points = curve.points[curve.before(self._given.get(name, 0)) :]
            self._given[name] = curve.given
            if points:
                new[name] = points
        return new

    def _linked(self) -> dict[str, object]:
        links = self._scene.links
        if links is None:
            return {}
        pairs = tuple((link.one, link.other, link.latency, link.there, link.back) for link in links.pairs)
        return {"links": pairs, "measured": links.measured}


def _row(view: RankView) -> RankRow:
    return RankRow(
        rank=view.rank,
        node=view.node,
        host=view.host,
        device=view.device,
        pid=view.pid,
        health=view.health,
        phase=view.phase,
        step=view.step,
        rate=round(view.rate, 3),
        samples=round(view.samples, 1),
        data=round(view.data, 2),
        compute=round(view.compute, 2),
        waiting=round(view.waiting, 2),
        cpu=round(view.cpu, 2),
        memory=view.memory,
        gpu=round(view.gpu, 2),
        gpu_memory=view.gpu_memory,
        silent=round(view.silent, 1),
        place=view.place,
    )


def _head(scene: RunModel) -> Head:
    return Head(
        run=scene.run,
        command=shlex.join(scene.command),
        state=scene.state,
        started=scene.started,
        now=scene.now,
        ended=scene.ended,
        code=scene.code,
        world_size=scene.world_size,
        nodes=scene.nodes,
        generation=scene.generation,
        attempt=scene.attempt,
        step=scene.step,
        total=scene.total,
        epoch=scene.epoch,
        rate=round(scene.rate, 4),
        samples=round(scene.samples, 2),
        goodput=round(scene.goodput, 5),
        lost=round(scene.lost, 2),
        left=round(scene.left, 1) if scene.left is not None else None,
    )


def _told(happening: TimelineEvent) -> Told:
    return Told(
        time=happening.time,
        kind=happening.kind,
        text=happening.text,
        ranks=happening.ranks,
        seconds=happening.seconds,
    )
