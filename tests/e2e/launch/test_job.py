"""`phalanx.launch`: a run that a Python program controls."""

from __future__ import annotations

import functools
import glob
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from phalanx import launch
from phalanx.errors import LaunchError, UsageError
from tests.kit.cli import python
from tests.kit.proc import until

pytestmark = pytest.mark.warmed


def written(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.smoke
def test_a_script(tmp_path: Path) -> None:
    script = written(tmp_path, "import os, sys; print(os.environ['RANK'], sys.argv[1:], os.environ['EXTRA'])")
    job = launch(script, ["--lr", "0.1"], workers=2, cpu=True, env={"EXTRA": "yes"}, show=False)
    assert job.wait(240) == 0
    assert job.result() is None
    assert [job.logs(rank) for rank in range(2)] == [f"{rank} ['--lr', '0.1'] yes\n" for rank in range(2)]
    assert not job.running
    assert job.name in repr(job)
    assert os.path.isdir(job.folder)
    with pytest.raises(UsageError, match=r"no rank 7: .* has ranks 0 to 1"):
        job.logs(7)


def test_a_job_that_fails_has_the_cause(tmp_path: Path) -> None:
    job = launch(written(tmp_path, "raise SystemExit('out of luck')"), workers=2, cpu=True, show=False)
    with pytest.raises(LaunchError, match="ended with exit code 1") as caught:
        job.result(240)
    assert "out of luck" in str(caught.value)
    assert "failed" in job.why()


@pytest.mark.smoke
def test_a_job_that_cannot_start_has_the_reason() -> None:
    job = launch("/nowhere/train.py", workers=1, cpu=True, show=False)
    with pytest.raises(LaunchError, match=r"/nowhere/train\.py"):
        _ = job.name
    assert job.wait(240) != 0


def test_stop_and_why_of_one_that_runs(tmp_path: Path) -> None:
    script = written(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(1000)")
    with launch(script, workers=2, cpu=True, show=False) as job:
        until(lambda: [job.logs(rank) for rank in range(2)] == ["here\n"] * 2, 30, "both ranks to begin")
        with pytest.raises(TimeoutError, match="running"):
            job.wait(0.01)
        assert "script.py:3" in until(
            lambda: (found := job.why()) and "ranks 0, 1" in found and found, 30, "both ranks"
        )
    assert job.exit_code == 143


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("train.py", "--lr 0.1"), {}, r"args is '--lr 0.1', expected a list\n.*\"train.py\", \['--lr', '0.1'\]\)"),
        ((functools.partial(len), "words"), {}, r"args is 'words', .*\n.*launch\(train, \['words'\]\)"),
        ((len, "words"), {}, r"args is 'words', expected a list\n.*launch\(len, \['words'\]\)"),
        (("train.py",), {"options": "--cpu -g 2"}, r"options is .*, expected a list\n.*\['--cpu', '-g', '2'\]"),
        ((None,), {}, r"launch\(\) was given None, expected the path of a script or a function"),
    ],
)
def test_wrong_arguments_start_nothing(arguments: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launch(*arguments, **options)


@pytest.mark.smoke
def test_wrong_arguments_of_a_job_are_refused() -> None:
    with launch("/nowhere/train.py", workers=1, cpu=True, show=False) as job:
        with pytest.raises(UsageError, match="stream is 'out', expected stdout or stderr"):
            job.logs(stream="out")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="rank is '0', expected a number"):
            job.logs("0")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="timeout is '5', expected seconds"):
            job.wait("5")  # type: ignore[arg-type]


def test_arguments_of_a_script_are_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a float, expected text"):
        launch(written(tmp_path, ""), ["--lr", 0.1], workers=1)


CALLER = """
import os, phalanx

def summed(number):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(number * (int(os.environ["RANK"]) + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), total.item()

if __name__ == "__main__":
    with phalanx.launch(summed, [5], workers=2, cpu=True) as job:
        assert job.result() == job.result()
    print(job.result())
"""


@pytest.mark.smoke
def test_a_function_and_its_results(tmp_path: Path) -> None:
    before = {*glob.glob(f"{tempfile.gettempdir()}/phalanx-call-*")}
    found = python(written(tmp_path, CALLER))
    assert (found.code, found.out) == (0, "[(0, 15), (1, 15)]\n"), found.err
    assert {*glob.glob(f"{tempfile.gettempdir()}/phalanx-call-*")} <= before


@pytest.mark.smoke
def test_a_function_that_cannot_be_sent() -> None:
    with open("/dev/null") as file, pytest.raises(UsageError, match="cannot be sent to the ranks"):
        launch(print, [file], workers=1)


def test_files_in_the_current_folder_do_not_replace_ours(tmp_path: Path) -> None:
    for name in ("phalanx", "msgspec", "json", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    with launch(os.getcwd, workers=2, cpu=True, cwd=tmp_path, show=False) as job:
        assert job.result(240) == [str(tmp_path)] * 2
