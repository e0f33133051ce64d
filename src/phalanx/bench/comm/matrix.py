"""Measures every link: from each rank to each other one, how soon something is there and how much goes over it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.comm import calls, everybody
from phalanx.bench.comm.calls import Party
from phalanx.bench.comm.cells import Link
from phalanx.bench.comm.links import slow
from phalanx.doctor.pairs import rounds

_PINGS = 20
_TIMES = 3
_AGAIN = 3  # where a link looks slow
_MOST_AGAIN = 16  # links; where more look slow it is no chance
_MOST = 64  # chunks
_Told = tuple[list[tuple[int, float, float]], str]


def measure(party: Party, nodes: Sequence[Sequence[int]], seconds: float) -> tuple[list[Link], str]:
    """Every rank must call it; all get the same. And why it could not be, or nothing.

    What looks slow is measured again, and the best counts: a machine that is busy for a moment is no bad cable.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tools = _Tools(party, (32 << 20) if party.device.type == "cuda" else (4 << 20))
    where = {one: node for node, ones in enumerate(nodes) for one in ones}
    both = [[*pairs, *((other, one) for one, other in pairs)] for pairs in rounds(ranks)]
    turns = [[pair for pair in pairs if (pair[0] < pair[1]) is there] for pairs in both for there in (True, False)]
    best: dict[int, tuple[float, float]] = {}
    found: list[Link] = []
    failure = _measure(tools, rank, turns, 0.0, {})  # which only opens the ways
    for again in range(_TIMES + _AGAIN):
        failure = failure or _measure(tools, rank, turns, seconds, best)
        mine = [(target, *numbers) for target, numbers in sorted(best.items())]
        told: list[_Told] = everybody.told((mine, failure), _Told)
        failure = next((why for _, why in told if why), "")
        found = [
            Link(ranks, party.name, source, target, latency, speed, where[source] == where[target])
            for source, (of_rank, _) in enumerate(told)
            for target, latency, speed in of_rank
        ]
        if again >= _TIMES - 1:
            turns = [[(one.link.source, one.link.target)] for one in slow(found)]
        if failure or not turns or (again >= _TIMES - 1 and len(turns) > _MOST_AGAIN):
            break
    return found, failure


def _measure(
    tools: _Tools,
    rank: int,
    turns: Sequence[Sequence[tuple[int, int]]],
    seconds: float,
    best: dict[int, tuple[float, float]],
) -> str:
    """From the first of each pair to the second, those of a turn at the same time. What went wrong."""
    failure = ""
    for pairs in turns:
        dist.barrier()
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is None or failure:
            continue
        source, target = mine
        try:
            if rank == source:
                latency, speed = tools.ask(target, seconds)
                before = best.get(target, (latency, speed))
                best[target] = min(before[0], latency), max(before[1], speed)
            else:
                tools.answer(source)
        except Exception as error:  # the others go on, and wait for all at every turn
            failure = calls.first_line(error)
    return failure


class _Tools:
    def __init__(self, party: Party, chunk: int) -> None:
        self._party = party
        self._note = torch.zeros(1, dtype=torch.int32, device=party.device)
        self._chunk = torch.zeros(chunk, dtype=torch.uint8, device=party.device)

    def ask(self, target: int, seconds: float) -> tuple[float, float]:
        """Seconds one way, bytes a second."""
        party = self._party
        trips = [self._trip(target, self._note) for _ in range(_PINGS)]
        trip = statistics.quantiles(trips, n=10)[0]
        once = self._trip(target, self._chunk)
        chunks = min(_MOST, max(1, int(seconds / once)))
        party.send(torch.full_like(self._note, chunks), target)
        begin = time.perf_counter()
        for _ in range(chunks):
            party.send(self._chunk, target)
        party.recv(self._note, target)
        party.settle()
        took = time.perf_counter() - begin
        return trip / 2, chunks * self._chunk.numel() / max(took - trip / 2, took / 2)

    def answer(self, source: int) -> None:
        party = self._party
        for tensor in [*[self._note] * _PINGS, self._chunk]:
            party.recv(tensor, source)
            party.send(self._note, source)
        count: Any = torch.zeros_like(self._note)
        party.recv(count, source)
        for _ in range(int(count.item())):
            party.recv(self._chunk, source)
        party.send(self._note, source)
        party.settle()

    def _trip(self, target: int, tensor: torch.Tensor) -> float:
        """There, and a note back."""
        begin = time.perf_counter()
        self._party.send(tensor, target)
        self._party.recv(self._note, target)
        self._party.settle()
        return time.perf_counter() - begin
