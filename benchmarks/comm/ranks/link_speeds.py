"""Measures latency and bandwidth of every link from one rank to another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.comm.ranks.backends import Backend
from benchmarks.comm.ranks.exchange import all_gather_json, first_line
from benchmarks.comm.results import Link, slow_links
from phalanx.doctor.pairs import rounds

_PINGS = 20
_REPEATS = 3
_SLOW_REPEATS = 3  # more for links that look slow
_MAX_SLOW = 16  # more slow links than this are not measured again
_MAX_CHUNKS = 64
_RankLinks = tuple[list[tuple[int, float, float]], str]


def measure(backend: Backend, nodes: Sequence[Sequence[int]], seconds: float) -> tuple[list[Link], str]:
    """Measure all links; return them, and why it failed or an empty string. Every rank must call it.

    Links that look slow are measured again and the best result counts, because the machine may be busy for a moment.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    probe = _Probe(backend, (32 << 20) if backend.device.type == "cuda" else (4 << 20))
    where = {one: node for node, ones in enumerate(nodes) for one in ones}
    both = [[*pairs, *((other, one) for one, other in pairs)] for pairs in rounds(ranks)]
    turns = [[pair for pair in pairs if (pair[0] < pair[1]) is there] for pairs in both for there in (True, False)]
    best: dict[int, tuple[float, float]] = {}
    found: list[Link] = []
    failure = _measure(probe, rank, turns, 0.0, {})  # only opens the connections
    for again in range(_REPEATS + _SLOW_REPEATS):
        failure = failure or _measure(probe, rank, turns, seconds, best)
        mine = [(target, *numbers) for target, numbers in sorted(best.items())]
        gathered: list[_RankLinks] = all_gather_json((mine, failure), _RankLinks)
        failure = next((why for _, why in gathered if why), "")
        found = [
            Link(ranks, backend.name, source, target, latency, speed, where[source] == where[target])
            for source, (of_rank, _) in enumerate(gathered)
            for target, latency, speed in of_rank
        ]
        if again >= _REPEATS - 1:
            turns = [[(one.link.source, one.link.target)] for one in slow_links(found)]
        if failure or not turns or (again >= _REPEATS - 1 and len(turns) > _MAX_SLOW):
            break
    return found, failure


def _measure(
    probe: _Probe,
    rank: int,
    turns: Sequence[Sequence[tuple[int, int]]],
    seconds: float,
    best: dict[int, tuple[float, float]],
) -> str:
    """Measure the pairs of each turn at the same time, from the first rank to the second; return the error, if any."""
    failure = ""
    for pairs in turns:
        dist.barrier()
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is None or failure:
            continue
        source, target = mine
        try:
            if rank == source:
                latency, speed = probe.ask(target, seconds)
                before = best.get(target, (latency, speed))
                best[target] = min(before[0], latency), max(before[1], speed)
            else:
                probe.answer(source)
        except Exception as error:  # the others continue, and wait for all ranks at every turn
            failure = first_line(error)
    return failure


class _Probe:
    def __init__(self, backend: Backend, chunk: int) -> None:
        self._backend = backend
        self._short = torch.zeros(1, dtype=torch.int32, device=backend.device)
        self._chunk = torch.zeros(chunk, dtype=torch.uint8, device=backend.device)

    def ask(self, target: int, seconds: float) -> tuple[float, float]:
        """Return the latency in seconds and the bandwidth in bytes per second."""
        backend = self._backend
        trips = [self._trip(target, self._short) for _ in range(_PINGS)]
        trip = statistics.quantiles(trips, n=10)[0]
        once = self._trip(target, self._chunk)
        chunks = min(_MAX_CHUNKS, max(1, int(seconds / once)))
        backend.send(torch.full_like(self._short, chunks), target)
        begin = time.perf_counter()
        for _ in range(chunks):
            backend.send(self._chunk, target)
        backend.recv(self._short, target)
        backend.settle()
        took = time.perf_counter() - begin
        return trip / 2, chunks * self._chunk.numel() / max(took - trip / 2, took / 2)

    def answer(self, source: int) -> None:
        backend = self._backend
        for tensor in [*[self._short] * _PINGS, self._chunk]:
            backend.recv(tensor, source)
            backend.send(self._short, source)
        count: Any = torch.zeros_like(self._short)
        backend.recv(count, source)
        for _ in range(int(count.item())):
            backend.recv(self._chunk, source)
        backend.send(self._short, source)
        backend.settle()

    def _trip(self, target: int, tensor: torch.Tensor) -> float:
        """Send a tensor and wait for a short answer."""
        begin = time.perf_counter()
        self._backend.send(tensor, target)
        self._backend.recv(self._short, target)
        self._backend.settle()
        return time.perf_counter() - begin
