"""`phalanx compare`: overlaid curves of runs, in the terminal, as a picture, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from phalanx.cli.main import main
from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.launcher.runs import history
from phalanx.watch.html.comparison import ComparedRunBuilder
from phalanx.watch.model import simulation
from phalanx.watch.model.incidents import Incidents
from tests.watch.finished_run import START, home, left
from tests.watch.model.run_events import sample, started


def compared(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    code = main(["compare", *args])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def rows(out: str) -> dict[str, list[str]]:
    """Return the rows of the table below the charts."""
    table = out.rpartition("\n\n")[2] if "the picture" not in out else out.split("\n\n")[-2]
    found = {}
    for line in table.splitlines()[1:]:
        name, *cells = [part.strip() for part in line.split("  ") if part.strip()]
        found[name] = cells
    return found


def silent(seconds: int) -> Iterator[AnyEvent]:
    """A run whose training reports nothing: it is only sampled."""
    return (event for event in simulation.run(2, seconds) if not isinstance(event, events.MetricsMeasured))


def test_two_runs_over_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    left("short", simulation.run(2, 60))
    left("long", simulation.run(4, 120, code=1), code=1, ranks=4)
    out = compared(capsys, "short", "long")
    for chart in ("loss over steps", "steps/s over steps", "samples/s over steps"):
        assert chart in out
    table = rows(out)
    assert table["state"] == ["done", "failed (1)"]
    assert table["steps"] == ["59", "119 (2.02x)"]
    assert table["samples/s"] == ["122", "244 (2.00x)"]
    assert table["faults"] == ["1", "1"]
    assert table["time lost"] == ["0.3 s", "10 s"]  # of two ranks none is stalled
    assert float(table["lowest loss"][0]) <= float(table["final loss"][0])
    assert all(len(line) <= 100 for line in out.splitlines())
    # there are no colours in a pipe: each has its own symbol
    assert out.splitlines()[:2] == ["* A  short", "+ B  long"]


def test_over_time_and_another_metric(capsys: pytest.CaptureFixture[str]) -> None:
    left("one", simulation.run(2, 60))
    left("two", simulation.run(2, 60))
    out = compared(capsys, "one", "two", "one", "--metric", "accuracy", "--over", "time")
    assert "accuracy over time" in out
    assert compared(capsys, "one", "one", "one").splitlines()[2] == "x C  one (3)"
    assert {"final accuracy", "lowest accuracy", "highest accuracy"} <= rows(out).keys()
    assert main(["compare", "one", "two", "--metric", "f1"]) == 2
    assert "there is: accuracy, loss" in capsys.readouterr().err


def test_without_a_loss_it_says_so_and_shows_how_fast_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    left("quiet", silent(60))
    left("also", silent(60))
    out = compared(capsys, "quiet", "also")
    assert "no loss was measured in either of them" in out
    assert "steps/s over steps" in out
    left("loud", simulation.run(2, 60))
    assert "quiet   (no loss was measured)" in compared(capsys, "quiet", "loud")


def test_what_another_version_wrote_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    known = left("known", simulation.run(2, 60))
    newer = left("newer", simulation.run(2, 60))
    for name in ("events", "samples"):
        path = Path(newer.folder) / f"{name}.jsonl"
        strange = b'{"event":"teleported","time":1,"x":[]}\nnot even JSON\n'
        path.write_bytes(strange + path.read_bytes() + b'{"event":"sample","time":')  # and it was cut off
    table = rows(compared(capsys, known.folder, newer.folder))
    assert table["steps"] == ["59", "59 (1.00x)"]


def test_a_run_of_before_has_its_own_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    happened = [
        event for event in simulation.run(2, 20) if not isinstance(event, events.MetricsMeasured | events.ClusterSample)
    ]
    old = left("old", happened)
    lines = [{"step": step, "epoch": 0, "time": START + step / 10, "loss": 10.0 / step} for step in range(1, 101)]
    lines.append({"step": 101, "epoch": 0, "time": START + 10.1, "loss": "nan"})
    (Path(old.folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    left("new", simulation.run(2, 20))
    table = rows(compared(capsys, "old", "new"))
    assert table["steps"][0] == "101"
    assert table["final loss"][0] == "nan"
    assert table["lowest loss"][0] == "0.1"
    assert table["steps/s"][0] == "10"


def test_a_short_run_has_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Samples have one step per second; the metrics of the training have all of them."""
    run = left("short", simulation.run(2, 10))
    lines = [
        {"step": step, "epoch": 0, "time": START + 2 + step / 20, "loss": 10.0 / (step + 1)} for step in range(200)
    ]
    (Path(run.folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = json.loads(compared(capsys, "short", "--json"))["runs"][0]
    assert [point[0] for point in output["curves"]["loss"]] == list(range(200))
    assert output["final"] == 10.0 / 200
    assert output["rates"]["samples/s"] == 122.0


def test_what_other_ranks_have_logged_has_its_rank_and_its_place() -> None:
    """Their lines are written later than rank 0's, and do not mean that the steps began again."""
    run = left("ranks", simulation.run(2, 10))
    lines: list[dict[str, float]] = [
        {"step": step, "epoch": 0, "time": START + 2 + step / 20, "loss": 10.0 / (step + 1)} for step in range(100)
    ]
    late = [{"step": n, "epoch": 0, "time": START + 2.01 + n / 20, "rank": 1, "heat": 70.0 + n} for n in (10, 20, 30)]
    lines[60:60] = late[:2]
    (Path(run.folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, late[2]]))
    track = ComparedRunBuilder("ranks")
    history.read(run, track.apply)
    curves = track.build().curves
    assert [point[0] for point in curves["loss"]] == list(range(100))
    assert [(point[0], point[2]) for point in curves["heat/rank 1"]] == [(10, 80.0), (20, 90.0), (30, 100.0)]
    assert not {"rank", "heat"} & curves.keys()


def test_steps_that_are_made_again_are_there_once() -> None:
    track = ComparedRunBuilder("again")
    for step in [*range(1, 11), *range(6, 16)]:
        track.apply(events.MetricsMeasured(time=START + step, step=step, values={"loss": 1 / step}))
    assert [step for step, _, _ in track.build().curves["loss"]] == list(range(1, 16))


def test_a_picture_is_written_whole_and_over_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    left("one", simulation.run(2, 30))
    left("two", simulation.run(2, 30))
    path = tmp_path / "picture.svg"
    for _ in range(2):  # one of ours is replaced
        assert f"image: {path}" in compared(capsys, "one", "two", "--svg", str(path))
    drawn = ElementTree.parse(path).getroot()
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"loss", "one", "two", "steps/s"} <= texts
    path.write_text("mine")
    assert main(["compare", "one", "two", "--svg", str(path)]) == 2
    assert "is not a picture of phalanx" in capsys.readouterr().err
    assert path.read_text() == "mine"
    compared(capsys, "one", "two", "--svg", str(path), "-f")
    assert path.read_text().startswith("<svg")
    assert main(["compare", "one", "two", "--svg", str(tmp_path / "no" / "where.svg")]) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["picture.svg"]


def test_json_has_curves_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    left("one", simulation.run(2, 60))
    left("two", simulation.run(4, 60), ranks=4)
    output = json.loads(compared(capsys, "one", "two", "--json"))
    assert [run["run"] for run in output["runs"]] == ["one", "two"]
    assert output["runs"][0]["curves"].keys() == {"loss", "steps/s", "samples/s"}
    assert output["ratios"]["samples/s"] == [1.0, 2.0]
    assert output["runs"][0]["faults"] == 1


def test_who_is_not_known_or_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    left("one", simulation.run(2, 10))
    assert main(["compare", "one", "nobody"]) == 2
    assert "no run called nobody" in capsys.readouterr().err
    assert main(["compare", "one", str(tmp_path)]) == 2
    assert "it has no run.json" in capsys.readouterr().err
    assert home().is_dir()


def test_a_stall_at_the_end_costs_its_time_and_not_the_usual_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate of a stalled run falls, point by point: none of these points is its speed."""
    trained = [event for event in simulation.run(4, 35) if not isinstance(event, events.RunEnded)]
    last = next(event for event in reversed(trained) if isinstance(event, events.ClusterSample))
    stands = [msgspec.structs.replace(last, time=last.time + second) for second in range(1, 60)]
    stalled = events.Stalled(time=last.time + 30, seconds=30.0)
    end = events.RunEnded(time=last.time + 60, code=130, seconds=97.0)
    left("stalled", [*trained, *stands[:30], stalled, *stands[30:], end], code=130, ranks=4)
    assert rows(compared(capsys, "stalled"))["steps/s"] == ["1"]
    incidents = Incidents()
    for event in (*trained, stalled, end):
        incidents.apply(event)
    assert (incidents.entries[-1].seconds, incidents.entries[-1].outcome) == (60.0, "until the run ended")


def test_a_run_without_a_step_has_no_goodput() -> None:
    built = ComparedRunBuilder("a")
    failed = events.WorkerFailed(time=3, rank=0, summary="rank 0 failed", code=1)
    for event in (*started(), sample(2, -1, -1), failed, events.RunEnded(time=4, code=1, seconds=4)):
        built.apply(event)
    assert (built.build().steps, built.build().goodput) == (0, None)
    built.apply(sample(5, 1, 1))
    assert built.build().goodput == 1.0
