"""The metrics of a run in the text format of Prometheus, version 0.0.4.

All metrics have the label `run`; those of a rank also have `rank`. phalanx_rank_info says where a rank runs. The
histogram covers all ranks together: with a label per rank it would be larger than everything else.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from phalanx.watch.model.progress import SAMPLES, STEPS
from phalanx.watch.model.rank import HEALTH, RankLocation, RankView
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.series.histogram import BOUNDS, Histogram
from phalanx.watch.model.status import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = (
    ("faults", "fault", "Ranks that failed, and nodes that were lost."),
    ("recoveries", "recovered", "Faults after which the other ranks continued."),
    ("restarts", "restarted", "Restarts of all ranks."),
    ("stalls", "stalled", "Stalls: no rank made progress."),
)


def text(model: RunModel) -> str:
    """Return all metrics of the run."""
    return "\n".join([*_run(model), *_counters(model), *_steps(model), *_ranks(model), *_measured(model), ""])


def _run(model: RunModel) -> Iterator[str]:
    run, over = _labels(run=model.run.name), model.run.ended is not None
    about = _labels(run=model.run.name, command=shlex.join(model.run.command))
    yield from _family("run_info", "gauge", "The command of the run.", [(about, 1)])
    yield from _family("up", "gauge", "1 until the run has ended.", [(run, int(model.run.ended is None))])
    states = [(_labels(run=model.run.name, state=state), int(state == model.run.state)) for state in get_args(State)]
    yield from _family("state", "gauge", "1 for the current state of the run.", states)
    gauges: list[tuple[str, str, float | None]] = [
        ("start_time_seconds", "Start time, in seconds since 1970.", model.run.started),
        ("world_size", "Number of ranks.", model.ranks.world_size),
        ("nodes", "Number of nodes that have ranks.", model.ranks.nodes),
        ("generation", "Number of regroups.", model.run.generation),
        ("attempt", "Number of restarts of all ranks.", model.run.attempt),
        ("step", "The highest step of any rank.", _known(model.progress.step)),
        ("steps_planned", "Planned steps.", model.progress.total or None),
        ("epoch", "Epoch, as the training counts it.", model.progress.epoch),
        (
            "steps_per_second",
            "Steps per second of the run, averaged over some seconds.",
            0.0 if over else model.progress.rate,
        ),
        (
            "samples_per_second",
            "Training samples per second of all ranks.",
            _known(min(0.0, model.progress.samples) if over else model.progress.samples),
        ),
        ("goodput_ratio", "Share of the time since the first step that was not lost.", model.goodput),
        ("verdicts", "Current verdicts about a stall.", len(model.problems.verdicts)),
    ]
    for name, words, value in gauges:
        if value is not None:
            yield from _family(name, "gauge", words, [(run, value)])


def _counters(model: RunModel) -> Iterator[str]:
    run = _labels(run=model.run.name)
    for name, kind, words in _COUNTERS:
        yield from _family(f"{name}_total", "counter", words, [(run, model.timeline.counts[kind])])
    words = "Seconds lost to faults and stalls that are over."
    yield from _family("seconds_lost_total", "counter", words, [(run, model.problems.lost_time.seconds)])


def _steps(model: RunModel) -> Iterator[str]:
    yield "# HELP phalanx_step_seconds Seconds per step and phase."
    yield "# TYPE phalanx_step_seconds histogram"
    for phase, histogram in model.ranks.times.items():
        yield from _histogram("phalanx_step_seconds", {"run": model.run.name, "phase": phase}, histogram)


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    so_far = 0
    for bound, count in zip((*BOUNDS, math.inf), histogram.counts, strict=True):
        so_far += count
        yield f"{name}_bucket{_labels(**labels, le=_number(bound))} {so_far}"
    yield f"{name}_sum{_labels(**labels)} {_number(histogram.total)}"
    yield f"{name}_count{_labels(**labels)} {so_far}"


def _ranks(model: RunModel) -> Iterator[str]:
    views = [model.ranks[rank] for rank in sorted(model.ranks)]
    if not views:
        return
    labels = {
        view.rank: _labels(run=model.run.name, rank=str(view.rank))[:-1] for view in views
    }  # the closing brace follows
    running = [view for view in views if not view.gone]
    blocking = {one.rank: one.share for one in model.stragglers.ranking()}

    def family(name: str, words: str, values: Iterable[tuple[RankView, str, float | None]]) -> Iterator[str]:
        samples = [(f"{labels[view.rank]}{more}}}", value) for view, more, value in values if value is not None]
        if samples:
            yield from _family(f"rank_{name}", "gauge", words, samples)

    where = [(view, _where(view.location), 1.0) for view in views]
    yield from family("info", "Where a rank runs.", where)
    states = [(view, f',state="{state}"', float(state == view.health)) for view in views for state in HEALTH]
    yield from family("health", "1 for the current health of a rank.", states)
    yield from family("step", "Step of a rank.", ((view, "", _known(view.steps.last)) for view in views))
    yield from family(
        "steps_per_second",
        "Steps per second of a rank, averaged over some seconds.",
        ((view, "", view.steps.rate) for view in running),
    )
    yield from family(
        "samples_per_second",
        "Training samples per second of a rank.",
        ((view, "", _known(view.steps.samples)) for view in running),
    )
    shares = [
        (view, f',phase="{phase}"', share)
        for view in running
        for phase, share in view.activity.shares._asdict().items()
    ]
    yield from family("phase_ratio", "Share of the time of a rank, in the last second.", shares)
    late = ((view, "", blocking.get(view.rank, 0.0)) for view in views)
    yield from family("blocking_ratio", "Share of the last minute that other ranks waited for this one.", late)
    yield from family(
        "silent_seconds", "Seconds since the last heartbeat of a rank.", ((view, "", view.silent) for view in views)
    )
    yield from family("cpu_cores", "CPU cores that a rank uses.", ((view, "", view.usage.cpu) for view in running))
    yield from family(
        "memory_bytes", "Host memory that a rank uses.", ((view, "", view.usage.memory) for view in running)
    )
    yield from family(
        "gpu_ratio", "Utilization of the GPU of a rank.", ((view, "", _known(view.usage.gpu)) for view in running)
    )
    memory = ((view, "", view.usage.gpu_memory if view.usage.gpu_memory > 0 else None) for view in running)
    yield from family("gpu_memory_bytes", "Used memory of the GPU of a rank.", memory)


def _where(location: RankLocation) -> str:
    return _more(node=str(location.node), host=location.host, device=location.device or "cpu")


def _measured(model: RunModel) -> Iterator[str]:
    values = [
        (_labels(run=model.run.name, name=name), curve.last)
        for name, curve in model.progress.curves.items()
        if curve.last is not None and name not in (STEPS, SAMPLES)
    ]
    if values:
        yield from _family("measured", "gauge", "Latest value of a metric of the training.", values)


def _family(name: str, kind: str, words: str, samples: Iterable[tuple[str, float | None]]) -> Iterator[str]:
    yield f"# HELP phalanx_{name} {words}"
    yield f"# TYPE phalanx_{name} {kind}"
    for labels, value in samples:
        if value is not None:
            yield f"phalanx_{name}{labels} {_number(value)}"


def _known(value: float) -> float | None:
    return value if value >= 0 else None


def _number(value: float) -> str:
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _labels(**labels: str) -> str:
    return "{" + _more(**labels)[1:] + "}"


def _more(**labels: str) -> str:
    return "".join(f',{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
