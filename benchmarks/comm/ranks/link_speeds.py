"""Measures latency and bandwidth of every link from one rank to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from benchmarks.comm.ranks.backends import Backend
from benchmarks.comm.ranks.exchange import all_gather_json, first_line
from benchmarks.comm.results import Link, slow_links
from phalanx.doctor.link_probe import LinkProbe
from phalanx.doctor.pairs import rounds

_REPEATS = 3
_SLOW_REPEATS = 3  # more for links that look slow
_MAX_SLOW = 16  # more slow links than this are not measured again
_RankLinks = tuple[list[tuple[int, float, float]], str]


def measure(backend: Backend, nodes: Sequence[Sequence[int]], seconds: float) -> tuple[list[Link], str]:
    """Measure all links; return them, and why it failed or an empty string. Every rank must call it.

    Links that look slow are measured again and the best result counts, because the machine may be busy for a moment.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunk = (32 << 20) if backend.device.type == "cuda" else (4 << 20)
    probe = LinkProbe(backend.send, backend.recv, chunk=chunk, device=backend.device, settle=backend.settle)
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
    probe: LinkProbe,
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
