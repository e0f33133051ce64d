"""A scene as Prometheus reads it: the text format, version 0.0.4.

Everything has the label `run`. What there is of each rank has `rank` besides; where it runs is told once, by
phalanx_rank_info. The histogram is of all ranks together: with a rank or a node in its labels it would be larger
than all the rest.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from phalanx.watch.model.histogram import BOUNDS, Histogram
from phalanx.watch.model.rank import HEALTH, RankView
from phalanx.watch.model.run_model import SAMPLES, STEPS, RunModel, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS = (
    ("faults", "fault", "Ranks that failed, and nodes that were lost."),
    ("recoveries", "recovered", "Faults after which the others went on."),
    ("restarts", "restarted", "Times that all ranks were started again."),
    ("stalls", "stalled", "Times that no rank went on."),
)


def text(scene: RunModel) -> str:
    return "\n".join([*_run(scene), *_counters(scene), *_steps(scene), *_ranks(scene), *_measured(scene), ""])


def _run(scene: RunModel) -> Iterator[str]:
    run, over = _labels(run=scene.run), scene.ended is not None
    about = _labels(run=scene.run, command=shlex.join(scene.command))
    yield from _family("run_info", "gauge", "What runs.", [(about, 1)])
    yield from _family("up", "gauge", "1 until the run has ended.", [(run, int(scene.ended is None))])
    states = [(_labels(run=scene.run, state=state), int(state == scene.state)) for state in get_args(State)]
    yield from _family("state", "gauge", "1 for the state that the run is in.", states)
    gauges: list[tuple[str, str, float | None]] = [
        ("start_time_seconds", "When it was started, since 1970.", scene.started),
        ("world_size", "Ranks.", scene.world_size),
        ("nodes", "Nodes that have ranks.", scene.nodes),
        ("generation", "How often the group has formed anew.", scene.generation),
        ("attempt", "How often all ranks were started again.", scene.attempt),
        ("step", "The furthest step.", _known(scene.step)),
        ("steps_planned", "Steps that it is going to make.", scene.total or None),
        ("epoch", "As the training counts them.", scene.epoch),
        ("steps_per_second", "Of the run, over some seconds.", 0.0 if over else scene.rate),
        ("samples_per_second", "Of all ranks.", _known(min(0.0, scene.samples) if over else scene.samples)),
        ("goodput_ratio", "Share of the time since the first step that was not lost.", scene.goodput),
        ("verdicts", "That stand now: why nothing goes on.", len(scene.verdicts)),
    ]
    for name, words, value in gauges:
        if value is not None:
            yield from _family(name, "gauge", words, [(run, value)])


def _counters(scene: RunModel) -> Iterator[str]:
    run = _labels(run=scene.run)
    for name, kind, words in _COUNTERS:
        yield from _family(f"{name}_total", "counter", words, [(run, scene.story.counts[kind])])
    words = "What faults and stalls that are over have cost."
    yield from _family("seconds_lost_total", "counter", words, [(run, scene.losses.seconds)])


def _steps(scene: RunModel) -> Iterator[str]:
    yield "# HELP phalanx_step_seconds What ranks spend a step on."
    yield "# TYPE phalanx_step_seconds histogram"
    for phase, histogram in scene.times.items():
        yield from _histogram("phalanx_step_seconds", {"run": scene.run, "phase": phase}, histogram)


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    so_far = 0
    for bound, count in zip((*BOUNDS, math.inf), histogram.counts, strict=True):
        so_far += count
        yield f"{name}_bucket{_labels(**labels, le=_number(bound))} {so_far}"
    yield f"{name}_sum{_labels(**labels)} {_number(histogram.total)}"
    yield f"{name}_count{_labels(**labels)} {so_far}"


def _ranks(scene: RunModel) -> Iterator[str]:
    views = [scene.ranks[rank] for rank in sorted(scene.ranks)]
    if not views:
        return
    labels = {view.rank: _labels(run=scene.run, rank=str(view.rank))[:-1] for view in views}  # open for more
    here = [view for view in views if not view.gone]  # of others it is only shown how they were
    held = {one.rank: one.share for one in scene.held}

    def family(name: str, words: str, values: Iterable[tuple[RankView, str, float | None]]) -> Iterator[str]:
        samples = [(f"{labels[view.rank]}{more}}}", value) for view, more, value in values if value is not None]
        if samples:
            yield from _family(f"rank_{name}", "gauge", words, samples)

    where = [(view, _more(node=str(view.node), host=view.host, device=view.device or "cpu"), 1.0) for view in views]
    yield from family("info", "Where a rank runs.", where)
    states = [(view, f',state="{state}"', float(state == view.health)) for view in views for state in HEALTH]
    yield from family("health", "1 for the state that a rank is in.", states)
    yield from family("step", "Optimizer steps that were seen.", ((view, "", _known(view.step)) for view in views))
    yield from family("steps_per_second", "Over some seconds.", ((view, "", view.rate) for view in here))
    yield from family("samples_per_second", "Of its own.", ((view, "", _known(view.samples)) for view in here))
    shares = [
        (view, f',phase="{phase}"', share)
        for view in here
        for phase, share in (("data", view.data), ("compute", view.compute), ("waiting", view.waiting))
    ]
    yield from family("phase_ratio", "Share of its time, in the last second.", shares)
    late = ((view, "", held.get(view.rank, 0.0)) for view in views)
    yield from family("held_ratio", "Share of the last minute that others waited for it.", late)
    yield from family("silent_seconds", "Since it was last heard of.", ((view, "", view.silent) for view in views))
    yield from family("cpu_cores", "That it uses.", ((view, "", view.cpu) for view in here))
    yield from family("memory_bytes", "Of the machine, that it uses.", ((view, "", view.memory) for view in here))
    yield from family("gpu_ratio", "Use of its GPU.", ((view, "", _known(view.gpu)) for view in here))
    memory = ((view, "", view.gpu_memory if view.gpu_memory > 0 else None) for view in here)
    yield from family("gpu_memory_bytes", "Of its GPU, that is used.", memory)


def _measured(scene: RunModel) -> Iterator[str]:
    values = [
        (_labels(run=scene.run, name=name), curve.last)
        for name, curve in scene.curves.items()
        if curve.last is not None and name not in (STEPS, SAMPLES)
    ]
    if values:
        yield from _family("measured", "gauge", "What the training has measured last.", values)


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
