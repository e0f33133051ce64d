"""The events of a simulated run with any number of ranks, deterministic. For tests, pictures and benchmarks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from phalanx.contract import events
from phalanx.contract.events import LETTERS, LinkMeasured, NodeRanks, RankInfo, RankSample

_STEP = "ddffffbbbwwo"  # a step of 1.2 s, one letter per tenth of a second


def begin(ranks: int, *, now: float, per_node: int = 8) -> list[events.AnyEvent]:
    """Return the events until all ranks have started."""
    nodes = math.ceil(ranks / per_node)
    hosts = tuple(f"node{number}" for number in range(nodes))
    infos = tuple(
        NodeRanks(
            node=node,
            host=host,
            ranks=tuple(
                RankInfo(rank=rank, pid=1000 + rank, device=f"gpu {rank % per_node}")
                for rank in range(node * per_node, min((node + 1) * per_node, ranks))
            ),
        )
        for node, host in enumerate(hosts)
    )
    links = tuple(
        LinkMeasured(one=one, other=other, latency=21e-6, there=11.6e9 if other != hosts[-1] else 1.1e9, back=11.5e9)
        for number, one in enumerate(hosts[:8])
        for other in hosts[number + 1 : 8]
    )
    return [
        events.RunStarted(time=now, run="train-simulated", command=("train.py",), world_size=ranks, pid=999),
        events.RendezvousProgress(time=now, expected=nodes, joined=hosts[:1], missing=hosts[1:]),
        events.RendezvousProgress(time=now + 1, expected=nodes, joined=hosts),
        events.Links(time=now + 1, measured=now - 3600, pairs=links),
        events.AttemptStarted(time=now + 1, attempt=0),
        events.RankInfos(time=now + 1, nodes=infos),
    ]


def second(number: int, ranks: int, *, now: float, seed: int = 1) -> list[events.AnyEvent]:
    """Return the events of one second of training.

    Rank 3 is slow. Rank 1 fails in second 20 and is replaced in the next one. Rank 2 is stuck from second 40 to 50.
    """
    rng = random.Random(f"{seed} {number}")  # noqa: S311
    stuck = 2 if 40 <= number < 50 and ranks > 2 else None
    steps = number if stuck is None else 40
    happened: list[events.AnyEvent] = []
    if number == 20 and ranks > 1:
        happened.append(events.FaultEvent(time=now, rank=1, reason="rank 1 failed: SIGKILL", recovery="regroup"))
    if number == 21 and ranks > 1:
        happened.append(events.Recovered(time=now, generation=1, seconds=0.31, step=steps))
    if number == 43 and stuck is not None:
        text = "rank 2 is in data loading, dataset.py:41 in __getitem__; the others wait for it in all_reduce #214"
        happened.append(events.Stalled(time=now, seconds=3.0))
        happened.append(events.VerdictEvent(time=now, kind="data", text=text, ranks=(2,)))
    if number == 50 and ranks > 2:
        happened.append(events.Resumed(time=now, seconds=10.0))
    generation = 1 if number > 20 else 0
    samples = tuple(_rank_sample(rank, steps, number, stuck, rng) for rank in range(ranks))
    happened.append(events.ClusterSample(time=now, seconds=1.0, generation=generation, ranks=samples))
    if stuck is None:
        loss = 2.3 * math.exp(-number / 60) + 0.1 + rng.gauss(0, 0.02)
        values: dict[str, float | None] = {"loss": loss, "accuracy": 1 - loss / 3}
        happened.append(
            events.MetricsMeasured(
                time=now, step=steps, epoch=steps // 100, total=1000, values=values, samples=ranks * 61.0
            )
        )
    return happened


def run(ranks: int, seconds: int, *, now: float = 1.7e9, code: int = 0) -> Iterator[events.AnyEvent]:
    """Yield the events of a whole run."""
    yield from begin(ranks, now=now)
    for number in range(seconds):
        yield from second(number, ranks, now=now + 2 + number)
    yield events.RunEnded(time=now + 2 + seconds, code=code, seconds=seconds + 2.0)


def _rank_sample(rank: int, steps: int, number: int, stuck: int | None, rng: random.Random) -> RankSample:
    if rank == 1 and number == 20:
        return RankSample(rank=rank, step=steps, phases=events.UNSEEN * 10, state="X")
    if stuck is not None:
        phases = LETTERS["data" if rank == stuck else "collective"] * 10
    else:
        at = number * 10 + (2 if rank == 3 else 0)
        phases = "".join(_STEP[(at + tick) % len(_STEP)] for tick in range(10))
        phases = phases.replace("o", "O")
    waiting = phases.lower().count("w") / 10
    data = phases.lower().count("d") / 10
    return RankSample(
        rank=rank,
        step=steps,
        phases=phases,
        data=data,
        compute=round(1 - waiting - data, 2),
        waiting=waiting,
        cpu=0.9 + rng.random() / 10,
        memory=(2 << 30) + rank * (1 << 20),
        gpu=round(0.8 + rng.random() / 5, 2) if stuck is None else 0.0,
        gpu_memory=60 << 30,
        samples=61.0 if stuck is None else 0.0,
        state="S" if rank == stuck else "R",
        place="dataset.py:41 __getitem__" if rank == stuck else "train.py:88 step",
    )
