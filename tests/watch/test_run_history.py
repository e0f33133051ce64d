"""The history of runs: `phalanx ps --all` shows the progress of each, and `--forget` removes one, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import run_lookup
from phalanx.cli.commands.manage import ps
from phalanx.cli.main import main
from phalanx.contract import events
from phalanx.errors import UsageError
from phalanx.forkserver import linux
from phalanx.launcher.runs import recorded_metrics, run_folder, summary
from phalanx.launcher.runs.finished_run import FinishedRun
from phalanx.launcher.viewers import views
from phalanx.watch.model import simulation
from phalanx.watch.source import Source
from tests.kit.cli import phalanx
from tests.watch.finished_run import START, home, left, record_at, wrote

SCRIPT = str(Path(__file__).parent / "scripts" / "falls.py")


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["ps", "--all", "--json"]) == 0
    return {run["id"]: run for run in map(json.loads, capsys.readouterr().out.splitlines())}


def failed_with(summary: str) -> list[events.AnyEvent]:
    return [
        *simulation.run(2, 30, code=1),
        events.WorkerFailed(time=START + 40, rank=1, summary=summary, code=1),
        events.RunEnded(time=START + 41, code=1, seconds=41.0),
    ]


def test_steps_and_reasons_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    left("well", simulation.run(2, 60))
    left("badly", failed_with("rank 1 failed: ValueError: no\nsuch key " + "x" * 300), code=1)
    left("killed", simulation.run(2, 5), code=None)
    asked = events.Stopping(time=START, reason="SIGINT", signal="SIGTERM")
    left("asked", [asked, events.RunEnded(time=START + 1, code=130, seconds=1.0)], code=130)
    summary_ = listed(capsys)
    assert (summary_["well"]["step"], summary_["well"]["faults"], summary_["well"]["why"]) == (59, 1, "")
    assert 0 < summary_["well"]["loss"] < 3
    assert summary_["badly"]["why"].startswith("rank 1 failed: ValueError: no such key x")
    assert len(summary_["badly"]["why"]) == 100
    assert summary_["killed"]["why"] == "its agent was killed"
    assert (summary_["asked"]["step"], summary_["asked"]["loss"], summary_["asked"]["why"]) == (None, None, "")


def test_only_the_end_of_long_files_is_read() -> None:
    record = left("long", [])
    fault = events.FaultEvent(time=START, rank=1, reason="killed", recovery="regroup")
    back = events.Recovered(time=START, generation=1, seconds=1.0, step=7)
    sample = events.ClusterSample(
        time=START, seconds=1.0, ranks=tuple(events.RankSample(rank=rank) for rank in range(512))
    )
    loss = events.MetricsMeasured(time=START, step=7, values={"train/loss": None, "accuracy": 0.5})
    (Path(record.folder) / "events.jsonl").write_bytes((events.encode(fault) + events.encode(back)) * 50_000)
    (Path(record.folder) / "samples.jsonl").write_bytes(events.encode(sample) * 500 + events.encode(loss))
    before = io_read()
    summary_ = summary.of(record)
    assert io_read() - before < 2_000_000
    assert 500 < summary_.faults < 50_000
    assert (summary_.step, str(summary_.loss)) == (7, "nan")


def test_the_latest_loss_is_shown_although_an_evaluation_came_after_it() -> None:
    steps = [events.MetricsMeasured(time=START + n, step=n, values={"loss": 1 / n}) for n in range(1, 5)]
    last = events.MetricsMeasured(time=START + 5, step=5, values={"accuracy": 0.5})
    summary_ = summary.of(left("evaluated", [*steps, last]))
    assert (summary_.step, summary_.loss) == (5, 0.25)


def test_the_last_steps_of_a_run_that_failed_are_in_its_metrics() -> None:
    """An agent receives metrics a few times per second, and a failing rank reports nothing more."""
    record = left("short", [events.MetricsMeasured(time=START, step=1, values={"loss": 0.9})], code=1)
    lines = [f'{{"step": {step}, "epoch": 0, "time": {START}, "loss": {1 / step}}}\n' for step in (1, 2, 4)]
    lines.append(f'{{"step": 4, "epoch": 0, "time": {START}, "accuracy": 0.5}}\n')
    (Path(record.folder) / "metrics.jsonl").write_text("".join(lines))
    summary_ = summary.of(record)
    assert (summary_.step, summary_.loss) == (4, 0.25)


def test_a_viewer_of_an_ended_run_gets_every_step() -> None:
    """An agent is sent a few steps per second only, and none before it watches its ranks."""
    sampled = [events.MetricsMeasured(time=START + 3, step=3, epoch=1, epochs=2, total=4, values={"loss": 0.3})]
    record = left("ended", [*sampled, events.RunEnded(time=START + 5, code=0, seconds=5.0)])
    lines = [f'{{"step": {step}, "epoch": 0, "time": {START + step}, "loss": {1 / step}}}\n' for step in (1, 2, 3, 4)]
    lines.insert(2, f'{{"step": 2, "epoch": 0, "time": {START + 2.5}, "accuracy": 0.5}}\n')
    path = Path(record.folder) / "metrics.jsonl"
    path.write_text("".join(lines))

    async def steps(source: Source) -> list[tuple[int, int, int, int]]:
        found = [event async for event in source.events() if isinstance(event, events.MetricsMeasured)]
        return [(event.step, event.epoch, event.epochs, event.total) for event in found]

    assert asyncio.run(steps(views.of(record))) == [(step, 1, 2, 4) for step in (1, 2, 2, 3, 4)]
    small = FinishedRun(record, most_metrics=path.stat().st_size - 1)
    assert asyncio.run(steps(small)) == [(3, 1, 2, 4)]


def io_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_table_fits_a_terminal_and_a_pipe_has_it_all() -> None:
    runs = [
        left("well-1115-101500-ab12", simulation.run(2, 60)),
        left("badly-1115-101501-cd34", failed_with("x" * 90), code=1),
    ]
    summary_ = [(run, summary.of(run)) for run in runs]
    narrow = ps.table(summary_, 100, now=START)
    assert max(map(len, narrow)) <= 100
    assert [line.split()[:2] for line in narrow] == [
        ["RUN", "STATE"],
        ["well-1115-101500-ab12", "done"],
        ["badly-1115-101501-cd34", "failed"],
        ["x" * 90],
    ]
    piped = ps.table(summary_, None, now=START)
    assert [line.split()[-1] for line in piped] == ["FOLDER", runs[0].folder, runs[1].folder]
    assert "train.py --lr 0.1" in piped[1]
    assert "x" * 90 in piped[2]


def test_a_command_is_one_line_that_no_terminal_obeys() -> None:
    record = replace(left("lines", []), command=["bash", "-c", "echo a\necho \x1b[31mb"])
    assert "bash -c 'echo a\\necho \\x1b[31mb'" in ps.table([(record, summary.of(record))], None, now=START)[1]


def test_forget_removes_the_run_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    left("stays", simulation.run(2, 5))
    gone = left("gone", simulation.run(2, 5))
    wrote(gone, 0, "hello")
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "model.pt").write_text("weights")
    (Path(gone.folder) / "best").symlink_to(treasure)
    elsewhere = left("elsewhere", simulation.run(2, 5), where=tmp_path / "logs")
    (home() / "runs" / "elsewhere").symlink_to(elsewhere.folder)
    (tmp_path / "logs" / "mine.txt").write_text("mine")
    assert main(["ps", "--forget", "gone", "elsewhere"]) == 0
    assert capsys.readouterr().out == "forgot gone\nforgot elsewhere\n"
    assert os.listdir(home() / "runs") == ["stays"]
    assert os.listdir(tmp_path / "logs") == ["mine.txt"]
    assert (treasure / "model.pt").read_text() == "weights"


def test_a_copy_is_not_forgotten_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    runs = home() / "runs"
    left("one", simulation.run(2, 5))
    shutil.copytree(runs / "one", runs / "mine")
    assert main(["ps", "--forget", "one"]) == 0
    assert os.listdir(runs) == ["mine"]
    assert main(["ps", "--forget", "one"]) == 0  # it is all that is left of it by now
    assert os.listdir(runs) == []


def test_a_run_that_cannot_be_deleted_does_not_keep_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    stays = left("a", simulation.run(2, 5))
    part = left("node_1", simulation.run(2, 5), where=Path(stays.folder))
    record_at(part, id="a", host="other", ended=None, code=None)
    left("b", simulation.run(2, 5))
    assert main(["ps", "--forget", "--older", "30d"]) == 2
    summary_ = capsys.readouterr()
    assert summary_.out == "forgot b\n"
    assert "a may still be running on other" in summary_.err
    assert os.listdir(home() / "runs") == ["a"]


def test_one_of_the_same_name_elsewhere_is_listed_too(tmp_path: Path) -> None:
    for name in ("one", "other"):
        folder = run_folder.create("same", base=str(home()), log_dir=str(tmp_path / name))
        folder.close()
        assert folder.link is not None
        assert os.path.realpath(folder.link) == folder.path


def test_a_folder_that_is_gone_does_not_change_how_a_run_ended(tmp_path: Path) -> None:
    folder = run_folder.create("one", base=str(tmp_path), log_dir=None)
    folder.record(left("other", simulation.run(2, 5)))
    shutil.rmtree(folder.path)
    folder.ended(0)
    folder.close()


def test_the_run_of_a_agent_whose_list_is_elsewhere(tmp_path: Path) -> None:
    record = left("far", simulation.run(2, 5), where=tmp_path)
    pid = os.getpid()
    record_at(record, pid=pid, pid_started=linux.start_time(pid), ended=None, code=None)
    assert run_lookup.find_by_pid(pid, record.folder).folder == record.folder
    with pytest.raises(UsageError, match="is not the agent of a run"):
        run_lookup.find_by_pid(pid)


@pytest.mark.parametrize("line", [b'{"time": 1, "step": 1e999}', b'{"time": 1, "step": 1, "loss": 1%s}' % (b"0" * 400)])
def test_a_line_that_is_none(line: bytes) -> None:
    assert recorded_metrics.parse(line) is None


def test_nodes_that_share_a_disk_are_forgotten_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = left("team", simulation.run(2, 5), where=tmp_path)
    part = left("node_1", simulation.run(2, 5), where=Path(whole.folder))
    record_at(part, id="team", node=1, host="other")
    for name, target in (("team", whole.folder), ("team.node_1", part.folder)):
        (home() / "runs").mkdir(parents=True, exist_ok=True)
        (home() / "runs" / name).symlink_to(target)
    record_at(part, id="team", node=1, host="other", ended=None, code=None)
    assert main(["ps", "--forget", "team"]) == 2
    assert "may still be running on other" in capsys.readouterr().err
    record_at(part, id="team", node=1, host="other")
    assert main(["ps", "--forget", "team"]) == 0
    assert os.listdir(home() / "runs") == []
    assert os.listdir(tmp_path) == []


def test_a_live_run_or_part_of_a_name_is_not_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    record = left("running", simulation.run(2, 5))
    record_at(record, pid=os.getpid(), pid_started=linux.start_time(os.getpid()), ended=None, code=None)
    assert main(["ps", "--forget", "running"]) == 2
    assert "fix: phalanx stop running" in capsys.readouterr().err
    assert main(["ps", "--forget", "run"]) == 2
    assert "no run is called run" in capsys.readouterr().err
    for words in (["--forget"], ["--older", "3d"], ["--forget", "--older", "soon"]):
        assert main(["ps", *words]) == 2
    assert Path(record.folder).is_dir()


def test_the_old_ones_are_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    left("ancient", simulation.run(2, 5))
    young = left("young", simulation.run(2, 5))
    record_at(young, started=time.time() - 3600)
    assert main(["ps", "--forget", "--older", "30d"]) == 0
    assert capsys.readouterr().out == "forgot ancient\n"
    assert main(["ps", "--forget", "--older", "30d"]) == 0
    assert capsys.readouterr().out == "no run is older than 30d\n"
    assert [run.id for run in run_folder.all_runs(str(home()))] == ["young"]


@pytest.mark.warmed
def test_a_real_run_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run whose rank 1 was killed."""
    done = phalanx("run", "-g", "2", "--cpu", SCRIPT, str(tmp_path))
    assert done.code == 0, done.err
    (run,) = run_folder.all_runs(str(home()))
    summary_ = summary.of(run)
    assert (summary_.step, summary_.faults, summary_.why) == (32, 1, "")
    assert summary_.loss is not None
    assert 0 <= summary_.loss < 10
    assert main(["compare", run.id, run.folder, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    one, other = compared["runs"]
    assert one["curves"] == other["curves"]
    assert (one["steps"], one["faults"], one["ranks"]) == (32, 1, 2)
    assert one["final"] == pytest.approx(summary_.loss)
    assert one["lost"] > 0
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path)]) == 0
    text = path.read_text()
    assert "It survived 1 fault" in text
    assert "learned &lt;b&gt;enough&lt;/b&gt;" in text
    assert "hunter2" not in text
