"""What one node sees of its own ranks, every second: from pages and the kernel to a Glance each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.contract.events import LETTERS, UNSEEN, RankInfo, RankSample
from phalanx.forkserver.probe.status_slot import PHASES, RING, SlotLook

if TYPE_CHECKING:
    from phalanx.diagnose.evidence import Gpu
    from phalanx.launch.agent.worker import Worker
    from phalanx.launch.agent.worker_group import WorkerGroup
    from phalanx.launch.telemetry.process_stats import ProcessStatsReader

TICKS = 10  # a second: so many letters
_LONGEST = RING - 4  # ticks that pages remember
_HOLDS = 0.25  # seconds for which a look says where a rank is: the next may come a little late
_SILENT = 0.5  # seconds, from which on it is worth a word
_WINDOW = 5.0  # seconds of which samples a second are told
_LETTERS = tuple(LETTERS[phase] for phase in PHASES)
_DATA, _WAITING, _APART = "d", "wj", "ikc"  # as stragglers are told: what is neither is compute


def letters(looks: Sequence[SlotLook], first: int, last: int, ahead: float, before: SlotLook | None = None) -> str:
    """Of the tenths of a second from `first` to `last`, the latter left out, by the clock on the wall; `ahead`: of that
    clock before the one of the looks. `before`: the look before them."""
    found: list[str] = []
    at, known = 0, before
    for tick in range(first, last):
        begins, ends = tick / TICKS - ahead, (tick + 1) / TICKS - ahead
        stepped = False
        while at < len(looks) and looks[at].time < ends:
            stepped = stepped or (known is not None and looks[at].step > known.step)
            known = looks[at]
            at += 1
        seen = known is not None and known.time > begins - _HOLDS
        letter = _LETTERS[known.phase] if known is not None and seen else UNSEEN
        found.append(letter.upper() if stepped else letter)
    return "".join(found)


def shares(looks: Sequence[SlotLook]) -> tuple[float, float, float]:
    """Of the time: data, compute, waiting."""
    if not looks:
        return 0.0, 0.0, 0.0
    seen = "".join(_LETTERS[look.phase] for look in looks)
    data, waiting, apart = (sum(map(seen.count, kinds)) for kinds in (_DATA, _WAITING, _APART))
    each = 1 / len(looks)
    return round(data * each, 2), round((len(looks) - data - waiting - apart) * each, 2), round(waiting * each, 2)


def place(text: Mapping[str, Any]) -> str:
    """train.py:41 step"""
    where: list[Any] = text.get("place") or []
    return f"{os.path.basename(where[0])}:{where[1]} {where[2]}" if len(where) == 3 else ""


@dataclass(frozen=True)
class _Span:
    """Of time: tenths of a second by the clock on the wall, which is so far ahead of the other one."""

    first: int
    last: int  # left out
    now: float
    ahead: float


@dataclass
class _Seen:
    """Of one worker, until now."""

    last: SlotLook | None = None
    step: int = 0  # that it was at, as far as it tells
    counts: deque[tuple[float, int]] = field(default_factory=deque)  # its own samples, and when it told

    def steps(self, worker: Worker, paged: int) -> int:
        """What it has told is up to half a second old; its page says how many it has made since. While its group forms
        anew it tells none, and stands where it stood: the page has only those that this process has made."""
        if not worker.step:
            return self.step or paged or -1
        self.step = worker.step + (max(0, paged - worker.paged) if worker.even else 0)
        return self.step

    def rate(self, worker: Worker) -> float:
        """Samples a second; -1: it does not tell."""
        if worker.samples < 0:
            self.counts.clear()
            return -1.0
        if self.counts and worker.samples < self.counts[-1][1]:  # it counts anew
            self.counts.clear()
        if not self.counts or worker.sampled > self.counts[-1][0]:
            self.counts.append((worker.sampled, worker.samples))
        while len(self.counts) > 2 and self.counts[-1][0] - self.counts[1][0] >= _WINDOW:
            self.counts.popleft()
        (then, before), (now, count) = self.counts[0], self.counts[-1]
        return round((count - before) / (now - then), 1) if now > then else -1.0


class RankSampler:
    """At the workers of one attempt."""

    def __init__(self, attempt: WorkerGroup, vitals: ProcessStatsReader) -> None:
        self.of = attempt
        self._vitals = vitals
        self._seen: dict[str, _Seen] = {}
        self._until: int | None = None  # tenths of a second that were told
        self.seconds = 1.0  # that the last ones were about

    def take(
        self, ranks: frozenset[int], tick: int, *, now: float, wall: float, gpus: Mapping[str, Gpu]
    ) -> tuple[RankSample, ...]:
        """Up to that tenth of a second, by the wall's clock; `now` and `wall`: what both clocks say."""
        ticks = tick - self._until if self._until is not None else TICKS
        first = tick - min(ticks if ticks >= 0 else TICKS, _LONGEST)  # or somebody has set the clock
        self._until, self.seconds = tick, (tick - first) / TICKS
        span = _Span(first, tick, now, wall - now)
        workers = {worker.seat.rank: (name, worker) for name, worker in self._workers(ranks)}
        self._seen = {name: self._seen.get(name, _Seen()) for name, _ in workers.values()}
        return tuple(self._glance(name, worker, span, gpus.get(name)) for _, (name, worker) in sorted(workers.items()))

    def faces(self, ranks: frozenset[int], node: int, host: str) -> tuple[RankInfo, ...]:
        found = {
            worker.seat.rank: RankInfo(
                rank=worker.seat.rank, node=node, host=host, device=str(worker.seat.slot.device or ""), pid=worker.pid
            )
            for _, worker in self._workers(ranks)
        }
        return tuple(face for _, face in sorted(found.items()))

    def _workers(self, ranks: frozenset[int]) -> list[tuple[str, Worker]]:
        """Those that have a rank; the living last: a dead one may not be replaced yet, or just have been."""
        found = [
            (name, worker)
            for name, worker in self.of.workers.items()
            if worker.pid and not worker.spare and worker.seat.rank in ranks
        ]
        return sorted(found, key=lambda pair: pair[1].code is None)

    def _glance(self, name: str, worker: Worker, span: _Span, gpu: Gpu | None) -> RankSample:
        rank, seen = worker.seat.rank, self._seen[name]
        page = worker.probe.page if worker.probe is not None else None
        since, until = span.first / TICKS - span.ahead, span.last / TICKS - span.ahead
        looks = worker.probe.looks(since) if worker.probe is not None else []
        looks = [look for look in looks if look.time < until]
        strip = letters(looks, span.first, span.last, span.ahead, seen.last)
        seen.last = looks[-1] if looks else seen.last
        step = seen.steps(worker, page.step if page is not None else 0)
        if worker.code is not None:
            return RankSample(rank=rank, step=step, phases=strip, state="X" if worker.code else "E")
        pulse = self._vitals.recent(worker.pid)
        data, compute, waiting = shares(looks)
        silent = span.now - page.looked if page is not None and page.looked and not page.text.get("ending") else 0.0
        return RankSample(
            rank=rank,
            step=step,
            phases=strip,
            data=data,
            compute=compute,
            waiting=waiting,
            cpu=round(pulse.cpu, 2),
            memory=pulse.resident,
            gpu=round(gpu.use, 2) if gpu is not None else -1.0,
            gpu_memory=gpu.memory if gpu is not None else 0,
            samples=seen.rate(worker),
            state=pulse.state,
            silent=round(silent, 1) if silent >= _SILENT else 0.0,
            debugged=rank in self.of.debugged,
            place=place(page.text) if page is not None else "",
        )
