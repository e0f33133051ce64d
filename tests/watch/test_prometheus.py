"""A model in the text format of Prometheus, read by a strict reader; and the dashboard that goes with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings

from phalanx.contract import events
from phalanx.watch import prometheus
from phalanx.watch.model import simulation
from phalanx.watch.model.rank import HEALTH
from phalanx.watch.model.run_model import RunModel
from tests.watch.any_events import EVENTS
from tests.watch.exposition import Family, read

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"


def seen(ranks: int, seconds: int) -> RunModel:
    model = RunModel()
    for event in list(simulation.run(ranks, seconds))[:-1]:  # it continues
        model.apply(event)
    return model


def value(families: dict[str, Family], name: str, /, **labels: str) -> float:
    return families[name].samples[name, tuple(sorted({"run": "train-simulated", **labels}.items()))]


def test_metrics_of_a_run() -> None:
    model = seen(4, 60)
    families = read(prometheus.text(model))
    assert all(name.startswith("phalanx_") for name in families)
    single = {
        "phalanx_up": 1,
        "phalanx_world_size": 4,
        "phalanx_nodes": 1,
        "phalanx_generation": 1,
        "phalanx_step": 59,
        "phalanx_steps_planned": 1000,
        "phalanx_steps_per_second": 1,
        "phalanx_samples_per_second": 244,
        "phalanx_faults_total": 1,
        "phalanx_recoveries_total": 1,
        "phalanx_stalls_total": 1,
        "phalanx_restarts_total": 0,
        "phalanx_seconds_lost_total": 10.31,
        "phalanx_verdicts": 0,
    }
    assert {name: value(families, name) for name in single} == pytest.approx(single)
    assert value(families, "phalanx_goodput_ratio") == pytest.approx(model.goodput)
    assert value(families, "phalanx_run_info", command="train.py") == 1
    assert value(families, "phalanx_state", state="running") == 1
    assert value(families, "phalanx_measured", name="loss") == pytest.approx(model.progress.curves["loss"].last)
    assert not any("steps/s" in dict(labels).values() for _, labels in families["phalanx_measured"].samples)
    assert value(families, "phalanx_rank_info", rank="3", node="0", host="node0", device="gpu 3") == 1
    assert value(families, "phalanx_rank_memory_bytes", rank="1") == (2 << 30) + (1 << 20)
    assert value(families, "phalanx_rank_gpu_memory_bytes", rank="1") == 60 << 30
    assert (
        value(families, "phalanx_rank_phase_ratio", rank="0", phase="waiting") == model.ranks[0].activity.shares.waiting
    )
    for rank in map(str, range(4)):
        health = {state: value(families, "phalanx_rank_health", rank=rank, state=state) for state in HEALTH}
        assert sorted(health.values()) == [0] * (len(HEALTH) - 1) + [1]
        assert health[model.ranks[int(rank)].health] == 1


def test_every_step_is_in_the_histograms() -> None:
    """All time of all ranks is assigned to a phase."""
    model = seen(4, 39)
    family = read(prometheus.text(model))["phalanx_step_seconds"]
    counts = {labels: count for (name, labels), count in family.samples.items() if name.endswith("_count")}
    assert len(counts) == 3
    # The start of the first step of each is unknown, and so is what rank 1 did when it died.
    assert set(counts.values()) == {4 * 38 - 1}
    spent = sum(total for (name, _), total in family.samples.items() if name.endswith("_sum"))
    assert spent == pytest.approx(4 * 38, rel=0.03)


def test_a_long_step_takes_as_long_as_it_takes() -> None:
    model = RunModel()
    for second in range(100):
        sample = events.RankSample(rank=0, step=second // 20, data=0.5, compute=0.3, waiting=0.2)
        model.apply(events.ClusterSample(time=100.0 + second, seconds=1.0, ranks=(sample,)))
    assert model.ranks.times["data"].total / model.ranks.times["data"].count == pytest.approx(10, rel=0.05)
    assert model.ranks.times["waiting"].count == 4


def test_times_do_not_depend_on_how_many_samples_were_kept() -> None:
    whole, some = RunModel(), RunModel()
    for second in range(400):
        sample = events.RankSample(rank=0, step=4 * second, data=0.5, compute=0.3, waiting=0.2)
        sample = events.ClusterSample(time=100.0 + second, seconds=1.0, ranks=(sample,))
        whole.apply(sample)
        if second % 8 == 0:
            some.apply(sample)
    for phase, histogram in whole.ranks.times.items():
        assert some.ranks.times[phase].total / some.ranks.times[phase].count == pytest.approx(
            histogram.total / histogram.count
        )


NASTY = 'a "b" \\ c\nd, e="f" } #'


def test_nothing_that_a_user_writes_breaks_out() -> None:
    model = RunModel()
    model.apply(events.RunStarted(time=0, run=NASTY, command=("python", NASTY), world_size=1, pid=1))
    node = events.NodeRanks(host=NASTY, ranks=(events.RankInfo(rank=0, device=NASTY),))
    model.apply(events.RankInfos(time=1, nodes=(node,)))
    model.apply(events.MetricsMeasured(time=2, step=1, values={NASTY: 1e-9, "big": 1e300, "negative": -2.5}))
    families = read(prometheus.text(model))
    measured = {dict(labels)["name"]: value for (_, labels), value in families["phalanx_measured"].samples.items()}
    assert measured == {NASTY: 1e-9, "big": 1e300, "negative": -2.5}
    assert {dict(labels)["run"] for family in families.values() for _, labels in family.samples} == {NASTY}
    assert [dict(labels)["host"] for _, labels in families["phalanx_rank_info"].samples] == [NASTY]


def test_a_run_without_events_has_few_metrics() -> None:
    families = read(prometheus.text(RunModel()))
    assert "phalanx_step" not in families
    assert "phalanx_rank_info" not in families


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_metrics_are_always_valid_and_counters_never_decrease(happened: list[events.AnyEvent]) -> None:
    model = RunModel()
    before: dict[str, float] = {}
    for event in happened:
        model.apply(event)
        families = read(prometheus.text(model))
        counters = {
            name: value
            for family in families.values()
            if family.kind == "counter"
            for (name, _), value in family.samples.items()
        }
        assert all(counters[name] >= then for name, then in before.items())
        before = counters


# -- examples/grafana.json


def _expressions(dashboard: dict[str, object]) -> list[str]:
    panels = dashboard["panels"]
    assert isinstance(panels, list)
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_nothing_that_there_is_not() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    families = read(prometheus.text(seen(4, 60)))
    known = {name for family in families.values() for name, _ in family.samples}
    labels = {name: {label for label, _ in pairs} for family in families.values() for name, pairs in family.samples}
    expressions = _expressions(dashboard)
    assert len(expressions) > 15
    asked = set()
    for expression in expressions:
        for name, chosen in re.findall(r"(phalanx_\w+)\{([^}]*)\}", expression):
            asked.add(name)
            assert name in known
            wanted = set(re.findall(r"(\w+)\s*=~?", chosen))
            assert "run" in wanted, "each panel is of the runs that were chosen"
            assert wanted <= labels[name]
        assert set(re.findall(r"phalanx_\w+", expression)) <= asked, "each metric names its run"
    assert {name.removesuffix("_bucket") for name in asked} >= {
        "phalanx_step",
        "phalanx_samples_per_second",
        "phalanx_goodput_ratio",
        "phalanx_step_seconds",
        "phalanx_rank_health",
        "phalanx_measured",
        "phalanx_rank_gpu_ratio",
    }


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 36
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    room = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & room, f"{panel['title']} lies on another"
        room |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)
