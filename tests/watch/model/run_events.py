"""Events of a small run, and the model that results from them."""

from __future__ import annotations

from phalanx.contract import events
from phalanx.contract.events import RankSample
from phalanx.watch.model.run_model import RunModel

AnyEvent = events.AnyEvent


def started(ranks: int = 2) -> list[AnyEvent]:
    return [
        events.RunStarted(time=0, run="r", command=("train.py",), world_size=ranks, pid=9),
        events.AttemptStarted(time=1, attempt=0),
        *(events.WorkerStarted(time=1, rank=rank, pid=10 + rank) for rank in range(ranks)),
    ]


def sample(
    when: float, *steps: int, phases: str = "ddffbbwwoO", generation: int = 0, **more: object
) -> events.ClusterSample:
    samples = tuple(
        RankSample(rank=rank, step=step, phases=phases, compute=0.5, data=0.25, waiting=0.25, **more)  # type: ignore[arg-type]
        for rank, step in enumerate(steps)
    )
    return events.ClusterSample(time=when, seconds=1.0, generation=generation, ranks=samples)


def model_of(*happened: AnyEvent) -> RunModel:
    model = RunModel()
    for event in happened:
        model.apply(event)
    return model


FAULT = events.FaultEvent(time=10.4, rank=1, reason="rank 1 failed: SIGKILL (Killed)", recovery="regroup")
RESTART = events.FaultEvent(time=10.4, rank=1, reason="rank 1 failed: SIGKILL (Killed)", recovery="restart")
STALL = events.Stalled(time=20, seconds=10)
VERDICT = events.VerdictEvent(time=20, kind="data", text="rank 1 is in data loading", ranks=(1,))
NOW = events.AttemptStarted(time=12, attempt=1)
