"""One report of a failed run: which rank failed first, how, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.contract import events
from tests.e2e.places import READY, pids, script
from tests.kit.cgroup import cgroup
from tests.kit.cli import phalanx, run, start, until
from tests.kit.handle import Handle

pytestmark = [pytest.mark.smoke, pytest.mark.xdist_group("failures")]  # they share a warm fork server


def block(err: str) -> str:
    """Return the message of phalanx at the end, without the output of workers."""
    return err[err.rindex("phalanx: rank") :]


def folder(err: str) -> Path:
    return Path(err[err.rindex("all of its output: ") :].split(": ", 1)[1].strip())


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# A rank that has raised ends after all others have: one that is late would be ended before it raises.
TOGETHER = """
import atexit, os, pathlib, time
@atexit.register
def all_have_raised():
    here = pathlib.Path(__file__).parent
    (here / f"raised {os.environ['RANK']}").touch()
    while len([*here.glob("raised *")]) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""


@pytest.mark.parametrize("way", [(), ("--fresh",)], ids=["cold", "fresh"])
def test_the_first_cause_is_named_with_its_exception_and_frames(way: tuple[str, ...]) -> None:
    result = phalanx("run", "-g", "3", "--cpu", *way, script("boom.py"), "1")
    report = block(result.err)
    assert result.code == 1
    assert report.startswith("phalanx: rank 1 failed: BadBatch: no shard called 'evaluate': é ü 数")
    assert "in step" in report
    assert "boom.py:20" in report
    assert "afterwards" not in report
    assert result.err.count("Traceback") == 0
    assert "[1] before the end" in result.out


@pytest.mark.warmed
def test_the_exception_is_also_in_the_error_file_in_torchruns_form() -> None:
    result = phalanx("run", "-g", "2", "--cpu", script("boom.py"), "1")
    record = json.loads((folder(result.err) / "error.json").read_text())
    assert record["message"]["message"].startswith("BadBatch: no shard")
    assert "KeyError: 'evaluate'" in record["message"]["extraInfo"]["py_callstack"]
    assert int(record["message"]["extraInfo"]["timestamp"]) == int(record["time"])


@pytest.mark.warmed
def test_ranks_that_fail_because_a_peer_is_gone_are_not_the_cause(tmp_path: Path) -> None:
    peer = write(
        tmp_path / "peer.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 2: os.kill(os.getpid(), 9)\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    result = phalanx("run", "-g", "3", "--cpu", peer)
    report = block(result.err)
    assert result.code == 137
    assert report.startswith("phalanx: rank 2 failed: SIGKILL (Killed)")
    assert "killed from outside" in report


@pytest.mark.warmed
@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("code", "7"), 7, "rank 0 failed: sys.exit(7)"),
        (("builtin", "7"), 7, "rank 0 failed: exit(7)"),
        (("text",), 1, "rank 0 failed: sys.exit: "),
        (("at once", "41"), 41, "exit code 41"),
        (("signal", "SIGSEGV"), 139, "SIGSEGV (Segmentation fault)"),
        (("signal", "SIGTERM"), 143, "SIGTERM (Terminated)"),
        (("normal",), 0, ""),
        (("none",), 0, ""),
    ],
)
def test_the_exit_code_is_the_workers(args: tuple[str, ...], code: int, words: str) -> None:
    result = phalanx("run", "-g", "1", "--cpu", script("exit_code.py"), *args)
    assert result.code == code
    assert words in result.err
    assert "a line without its end" in result.out


@pytest.mark.warmed
def test_the_text_of_sys_exit_is_shown_once() -> None:
    result = phalanx("run", "-g", "2", "--cpu", script("exit_code.py"), "text", ",", "code", "0")
    assert result.code == 1
    assert "rank 0 failed: sys.exit: what went wrong: é\n" in result.err
    assert result.err.replace('sys.exit("what', "").count("what went wrong") == 1, result.err
    assert "what went wrong" in (folder(result.err) / "stderr.log").read_text()


def test_a_worker_killed_for_memory_is_reported_as_such(tmp_path: Path) -> None:
    greedy = write(
        tmp_path / "greedy.py",
        "import os, time\n"
        "open('/proc/self/oom_score_adj', 'w').write('1000')\n"
        "if os.environ['RANK'] == '1': taken = bytearray(400 << 20)\n"
        "time.sleep(600)\n",
    )
    with cgroup("memory", "memory.limit_in_bytes", 200 << 20) as enter:
        result = run((*enter, sys.executable, "-m", "phalanx", "run", "-g", "2", "--cpu", "--fresh", greedy))
    report = block(result.err)
    assert result.code == 137
    # The kernel may kill both, and the small one can be gone first.
    assert re.search("rank [01] failed: SIGKILL", report), report
    assert "too much memory (limit 0.2 GiB)" in report


@pytest.mark.warmed
def test_everything_is_in_the_run_folder() -> None:
    result = phalanx("run", "-g", "2", "--cpu", "--log-dir", "logs", script("boom.py"), "1", cwd=os.environ["TMPDIR"])
    run_folder = folder(result.err).parents[1]
    assert run_folder.parent == Path(os.environ["TMPDIR"], "logs")
    assert (run_folder / "attempt_0/1/stdout.log").read_text() == "before the end\n"
    assert "BadBatch" in (run_folder / "attempt_0/1/stderr.log").read_text()
    assert (run_folder / "attempt_0/0/stdout.log").read_text() == ""
    recorded = [events.decode(line) for line in (run_folder / "events.jsonl").read_bytes().splitlines()]
    # What the run was started with is found out beside it, at any time.
    kinds = [type(event).__name__ for event in recorded if not isinstance(event, events.RunDescribed)]
    assert kinds[:3] == ["RunStarted", "ForkServerReady", "AttemptStarted"]
    assert kinds.count("WorkerStarted") == kinds.count("WorkerExited") == 2
    assert kinds[-2:] == ["WorkerFailed", "RunEnded"]
    failed = next(event for event in recorded if isinstance(event, events.WorkerFailed))
    assert (failed.rank, failed.code) == (1, 1)
    assert json.loads((run_folder / "run.json").read_text())["code"] == 1
    subprocess.run(["rm", "-r", run_folder.parent], check=True)


# -- restarts


def attempts(job: Handle, ranks: int, count: int) -> list[int]:
    return pids(job, READY, ranks * count)[-ranks:]


@pytest.mark.warmed
def test_all_ranks_start_again_with_an_empty_store(tmp_path: Path) -> None:
    twice = write(
        tmp_path / "twice.py",
        "import os, torch, torch.distributed as dist\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x)\n"
        "if attempt < 2 and dist.get_rank() == 1: os.kill(os.getpid(), 9)\n"
        "dist.all_reduce(x)\n"
        "print(f'sum {x.item()} attempt {attempt}\\n', end='')\n"
        "dist.destroy_process_group()\n",
    )
    result = phalanx("run", "-g", "3", "--cpu", "--max-restarts", "3", twice)
    assert result.code == 0, result.err
    assert result.out.count("sum 9.0 attempt 2") == 3
    assert result.err.count("rank 1 failed: SIGKILL") == 2
    assert "restart 2 of 3" in result.err


@pytest.mark.warmed
def test_restarts_run_out() -> None:
    result = phalanx("run", "-g", "2", "--cpu", "--max-restarts", "1", script("boom.py"), "1")
    assert result.code == 1
    assert result.err.count("rank 1 failed: BadBatch") == 2
    assert "Traceback" not in result.err
    assert "restart 1 of 1" in result.err


@pytest.mark.warmed
def test_a_signal_is_not_a_reason_to_start_again() -> None:
    job = start("run", "-g", "2", "--cpu", "--max-restarts", "5", script("sleepy.py"))
    pids(job, READY, 2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "starting all ranks again" not in job.err


@pytest.mark.warmed
def test_the_cause_of_an_exception_is_reported_and_every_rank_that_raised_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "together.py", TOGETHER)
    chain = write(
        tmp_path / "chain.py",
        "def inner(): import no_such_module\n"
        "import together\n"
        "try: inner()\n"
        "except ImportError as error: raise RuntimeError('Failed to import\\nthe trainer') from error\n",
    )
    report = block(phalanx("run", "-g", "2", "--cpu", chain).err).splitlines()
    assert report[0].endswith("failed: RuntimeError: Failed to import")
    assert "    the trainer" in report
    assert "  caused by: ModuleNotFoundError: No module named 'no_such_module'" in report
    assert f"    {chain}:1 in inner" in report
    assert any(line.startswith("  afterwards: rank ") and line.endswith(" failed in the same way") for line in report)


@pytest.mark.warmed
def test_a_crash_shows_the_line_that_faulthandler_has_written(tmp_path: Path) -> None:
    crash = write(
        tmp_path / "crash.py",
        "import ctypes, faulthandler\nfaulthandler.enable()\ndef crash():\n    ctypes.string_at(0)\ncrash()\n",
    )
    result = phalanx("run", "-g", "1", "--cpu", crash)
    report = block(result.err)
    assert result.code == 139
    assert report.startswith("phalanx: rank 0 failed: Fatal Python error: Segmentation fault\n  ended with SIGSEGV")
    assert f"{crash}:4 in crash" in report


@pytest.mark.warmed
def test_a_typo_is_reported_once_and_not_retried_and_the_logs_have_it_whole(tmp_path: Path) -> None:
    write(tmp_path / "together.py", TOGETHER)
    typo = write(
        tmp_path / "typo.py",
        "import phalanx, together\ndef train(run):\n    learning_rate = 0.1\n    print(learning_rat)\n"
        "phalanx.main(train)\n",
    )
    result = phalanx("run", "-g", "3", "--cpu", typo)
    report = result.err.splitlines()[1:]
    assert result.code == 1
    assert len(report) == 6, result.err
    assert report[0].endswith("NameError: name 'learning_rat' is not defined. Did you mean: 'learning_rate'?")
    assert report[1:3] == [f"  {typo}:4 in train", "      print(learning_rat)"]
    assert report[3].endswith(" failed in the same way")
    assert report[5] == "  not retrying: an error in the script or its arguments"
    assert "Traceback (most recent call last):" in (folder(report[4]) / "stderr.log").read_text()


@pytest.mark.warmed
def test_a_failure_at_the_same_step_is_no_progress_however_late_the_step_is_reported(tmp_path: Path) -> None:
    """The first try ends before its step is reported at an interval, the second one after that."""
    late = write(
        tmp_path / "late.py",
        "import time, torch, phalanx\n"
        "def train(run):\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    run.keep(model, opt)\n"
        "    for _ in range(3):\n"
        "        run.backward(model(torch.ones(1)).sum())\n"
        "        run.step(opt)\n"
        "    if run.group.generation: time.sleep(1.5)\n"
        "    raise ValueError('no such file')\n"
        "phalanx.main(train)\n",
    )
    result = phalanx("run", "-g", "1", "--cpu", late)
    assert result.code == 1
    assert result.err.count("; regrouped, ") == 2, result.err
    assert "  not retrying: the same failure 3 times with no progress" in result.err


@pytest.mark.warmed
def test_an_innocent_rank_is_reported_in_one_line_and_verbose_shows_everything(tmp_path: Path) -> None:
    bad = write(
        tmp_path / "bad.py",
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('a warning', file=sys.stderr)\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: raise ValueError('é ü 数\\n' + 'line\\n' * 2000)\n"
        "while True: dist.all_reduce(torch.ones(1))\n",
    )
    result = phalanx("run", "-g", "2", "--cpu", bad)
    assert result.code == 1
    assert sorted(line for line in result.err.splitlines() if line.startswith("[")) == [
        "[0] a warning",
        "[1] a warning",
    ]
    report = block(result.err).splitlines()
    assert report[0] == "phalanx: rank 1 failed: ValueError: é ü 数"
    assert len(report) < 12
    assert report[1:6] == ["    line"] * 4 + ["    …"]
    assert set(report[-2:-1]) <= {
        "  afterwards: rank 0 lost the peer",
        "      if dist.get_rank() == 1: raise ValueError(",
    }
    loud = phalanx("run", "-g", "2", "--cpu", "--verbose", bad)
    assert loud.err.count("[1] line\n") == 2000
    assert "[1] Traceback (most recent call last):" in loud.err
    assert "rank1" not in loud.err


@pytest.mark.warmed
def test_a_usage_error_is_reported_once(tmp_path: Path) -> None:
    usage = write(
        tmp_path / "usage.py",
        "import argparse\n"
        "parser = argparse.ArgumentParser(prog='usage.py')\n"
        "parser.add_argument('--lr', required=True)\n"
        "parser.parse_args()\n",
    )
    result = phalanx("run", "-g", "3", "--cpu", "--max-restarts", "3", usage)
    assert result.code == 2
    assert result.err.count("the following arguments are required: --lr") == 1
    assert result.err.count("usage: usage.py [-h] --lr LR") == 1
    assert f"  {usage}:4 in <module>" in result.err
    assert "  not retrying: an error in the script or its arguments" in result.err
    shown = phalanx("run", "-g", "2", "--cpu", usage, "--help")
    assert shown.code == 0
    assert shown.out.count("usage: usage.py") == 2


@pytest.mark.warmed
def test_ctrl_c_is_one_line_and_one_state(tmp_path: Path) -> None:
    loop = write(
        tmp_path / "loop.py",
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('ready', flush=True)\n"
        "while True: dist.all_reduce(torch.ones(1))\n",
    )
    job = start("run", "-g", "2", "--cpu", loop)
    job.wait_for("ready", 2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.err.splitlines()[1:] == ["phalanx: stopped by Ctrl-C"]
    assert "stopped by Ctrl-C" in phalanx("ps", "--all").out


def test_ctrl_c_as_soon_as_there_is_a_run(tmp_path: Path) -> None:
    """The agent is not imported yet, and handles no signals."""
    runs = Path(os.environ["PHALANX_HOME"], "runs")
    job = start("run", "-g", "2", "--cpu", write(tmp_path / "sleeps.py", "import time\ntime.sleep(1000)\n"))
    until(lambda: any(runs.glob("*/run.json")), 60, "the run")
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.both
    assert job.err.splitlines()[-1] == "phalanx: stopped by Ctrl-C"
    assert "stopped by Ctrl-C" in phalanx("ps", "--all").out
