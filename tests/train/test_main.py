"""phalanx.main: its result, its exit code, and its report to the launcher."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import CheckpointError, JoinError, PhalanxError, UsageError
from phalanx.train.main import _leave_out_frames
from phalanx.worker.process_group.group import WorkerProcessGroup
from tests.kit.cli import PHALANX, PYTHON, terminal
from tests.kit.cli import phalanx as command

WORDS = "phalanx: a rate of zero\n  rates: 0.1\n  fix: lr=0.1\n"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The error file of a launcher. There is no other part of a launcher here."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def raising(error: BaseException) -> Any:
    def train(run: phalanx.Run) -> None:
        raise error

    return train


# -- in this process: alone, no port is opened


def test_what_train_returns_is_returned() -> None:
    def train(run: phalanx.Run) -> tuple[phalanx.Run, int, int]:
        return run, run.group.seed, run.world_size

    run, seed, world = phalanx.main(train, seed=3)
    assert (seed, world, run.group.closed) == (3, 1, True)


@pytest.mark.parametrize(("error", "code"), [(UsageError, 2), (JoinError, 1), (CheckpointError, 1)], ids=str)
def test_errors_of_phalanx_are_reported_without_a_traceback(
    error: type[PhalanxError], code: int, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        phalanx.main(raising(error("a rate of zero", details=["rates: 0.1"], fix="lr=0.1")))
    assert caught.value.code == code
    output = capsys.readouterr().err
    assert output.startswith(WORDS)
    where = output.removeprefix(WORDS).splitlines()
    assert where[0].startswith(f"  {__file__}:")  # the rejected call, without a line of phalanx
    assert (where[0].endswith(" in train"), where[1:]) == (True, ["      raise error"])
    found = json.loads(report.read_text())
    assert f"phalanx: {found['message']['message']}\n" == WORDS
    assert ([frame[2:] for frame in found["frames"]], found["code"]) == ([["train", "raise error"]], code)


def test_before_there_is_a_run(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for train, options, words in ((None, {}, "not None"), (len, {"timeout": -1}, "timeout=-1 is not a valid timeout")):
        with pytest.raises(SystemExit) as caught:
            phalanx.main(train, **options)  # type: ignore[arg-type]
        assert caught.value.code == 2
        assert words in capsys.readouterr().err
    assert "main() takes a function" in report.read_text()  # the first one is kept


def test_any_other_exception_propagates_and_is_reported_at_once(report: Path) -> None:
    held = []

    class Slow:
        def close(self) -> None:
            held.append(json.loads(report.read_text())["time"])

    def train(run: phalanx.Run) -> None:
        run.group.before_close(Slow().close)
        held.append(run)
        raise ValueError("a broken sample")

    with pytest.raises(ValueError, match="a broken sample"):
        phalanx.main(train)
    found = json.loads(report.read_text())
    assert held[0].group.closed
    assert found["message"]["message"] == "ValueError: a broken sample"
    assert 'raise ValueError("a broken sample")' in found["message"]["extraInfo"]["py_callstack"]
    assert [frame[2] for frame in found["frames"]] == ["train"]
    assert abs(found["time"] - time.time()) < 60


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("a broken sample"), "    raise error\nValueError: a broken sample"),
        (UsageError("a rate of zero"), "a rate of zero"),
    ],
)
def test_torchrun_understands_it(error: Exception, words: str, report: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    with pytest.raises((ValueError, SystemExit)):
        phalanx.main(raising(error))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(report))
    assert words.replace("\n", "\n  ") in ChildFailedError("train.py", {0: failure}).format_msg()
    assert abs(failure.timestamp - time.time()) < 60


def test_an_earlier_report_is_not_replaced(report: Path) -> None:
    report.write_text("{}")
    with pytest.raises(ValueError, match="late"):
        phalanx.main(raising(ValueError("late")))
    assert report.read_text() == "{}"


@pytest.mark.parametrize(("code", "failed"), [(None, False), (0, False), (3, True), ("in words", True)])
def test_an_exit_keeps_its_code(code: object, failed: bool, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    real = WorkerProcessGroup.close

    def close(self: WorkerProcessGroup, *, failed: bool = False) -> None:
        ends.append(failed)
        real(self, failed=failed)

    monkeypatch.setattr(WorkerProcessGroup, "close", close)
    with pytest.raises(SystemExit) as caught:
        phalanx.main(raising(SystemExit(code)))
    assert caught.value.code == code
    assert ends == [failed]
    assert not report.exists()


def test_an_error_at_the_end_does_not_hide_the_first(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = WorkerProcessGroup.close

    def close(self: WorkerProcessGroup, *, failed: bool = False) -> None:
        real(self, failed=failed)
        raise CheckpointError("step 8 is not on the disk")

    monkeypatch.setattr(WorkerProcessGroup, "close", close)
    with pytest.raises(ValueError, match="a broken sample") as caught:
        phalanx.main(raising(ValueError("a broken sample")))
    assert caught.value.__notes__ == ["and while the run was closed, CheckpointError: step 8 is not on the disk"]
    assert "ValueError" in report.read_text()
    with pytest.raises(SystemExit):
        phalanx.main(raising(UsageError("a rate of zero")))
    assert "a rate of zero\n  and while the run was closed" in capsys.readouterr().err
    for end in (lambda run: None, raising(SystemExit(0))):  # but it is the first cause if there is no other
        with pytest.raises(SystemExit) as left:
            phalanx.main(end)
        assert left.value.code == 1
        assert "phalanx: step 8 is not on the disk" in capsys.readouterr().err


def test_the_traceback_of_a_script_has_one_frame_of_phalanx(report: Path) -> None:
    with pytest.raises(ValueError, match="a broken sample") as caught:
        phalanx.main(raising(ValueError("a broken sample")))
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert [Path(file).name for file in files] == ["test_main.py", "main.py", "test_main.py"]


def test_a_traceback_that_does_not_begin_in_main_stays_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    _leave_out_frames(caught.value)
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 1


def test_a_seed_is_checked_before_anything_starts(capsys: pytest.CaptureFixture[str], report: Path) -> None:
    with pytest.raises(SystemExit):
        phalanx.main(lambda _: None, seed="x")
    assert "seed='x': expected a whole number" in capsys.readouterr().err


def test_an_interrupt_propagates(report: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        phalanx.main(raising(KeyboardInterrupt()))
    assert not report.exists()


# -- under launchers

SCRIPT = """
import sys, time, torch, phalanx
from phalanx.errors import UsageError

def deep(run):
    if run.rank == 1 or run.world_size == 1:
        raise ValueError("a broken sample")
    run.group.barrier()

def words(run):
    raise UsageError("a rate of zero", details=["rates: 0.1"], fix="lr=0.1")

class Optimizer:  # as much of one as a step needs: this is about its end
    param_groups = []
    def step(self): time.sleep(0.01)
    def zero_grad(self, set_to_none): pass

def slow(run):
    opt, data = Optimizer(), run.loader(torch.randn(100_000, 4), batch_size=2)
    for epoch in run.epochs(1):
        for x in run.batches(data):
            run.step(opt, loss=x.mean())

phalanx.main({"deep": deep, "words": words, "slow": slow}[sys.argv[1]])
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.warmed
def test_phalanx_run_reports_the_first_cause(script: str) -> None:
    done = command("run", "-g", "2", "--cpu", script, "deep")
    assert done.code == 1
    block = done.err[done.err.index("rank 1 failed: ValueError: a broken sample") :]
    assert f"{script}:7 in deep\n      raise ValueError(" in block
    assert "main.py" not in block  # code of phalanx, which is not interesting
    assert "Traceback" not in done.err  # the block says the same


@pytest.mark.warmed
def test_phalanx_run_reports_errors_of_phalanx_without_a_traceback(script: str) -> None:
    done = command("run", "-g", "1", "--cpu", script, "words")
    assert done.code == 2
    assert WORDS in done.err
    output = WORDS.removeprefix("phalanx: ").partition("\n")[0]  # the rest is above
    assert f"phalanx: rank 0 failed: {output}\n  all of its output: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.warmed
@pytest.mark.parametrize(
    ("words", "code", "before", "last"),
    [
        ((*PYTHON,), -signal.SIGINT, "", r"\n[^\n]*Traceback[\s\S]*KeyboardInterrupt"),
        ((*PHALANX, "run", "-g", "2", "--cpu"), 130, r"\[0\](\x1b\[0m)? ", r"\n[^\n]*phalanx: stopped by Ctrl-C\r\n"),
    ],
    ids=["python", "phalanx"],
)
def test_ctrl_c_ends_a_training_and_its_bar(
    words: tuple[str, ...], code: int, before: str, last: str, script: str
) -> None:
    job = terminal(words=(*words, script, "slow"), size=(24, 100))
    job.wait_for(re.compile(before + "[^\n]*━*─+ *[1-9][0-9]*/[^\n]*loss[^\n]*samples/s[^\n]* left"))
    job.send(b"\x03")
    assert job.wait(60) == code
    # The last row of the bar is complete, and messages about the end are below it.
    assert re.search(rf" left(\x1b\[K)?\s*{last}", job.out), job.out[-3000:]


@pytest.mark.warmed
def test_one_training_may_follow_another(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        "import phalanx\nfor _ in range(2):\n    phalanx.main(lambda run: run.print('sum', run.group.sum(1)))\n"
    )
    done = command("run", "-g", "2", "--cpu", str(script))
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["[0] sum 2"] * 2  # an int: a sum of counts is a count
