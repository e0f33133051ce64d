"""A worker cannot detect whether torchrun, phalanx or plain python started it.

torchrun is run once for each case, and its report compared with those of every way in which phalanx starts workers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kit.cli import (
    PHALANX,
    TORCHRUN,
    Env,
    Handle,
    Result,
    free_port,
    phalanx,
    python,
    run,
    start,
    warm,
    warm_environment,
)
from tests.kit.reports import SCRIPTS, Case, Observed, differences, observe, oddities
from tests.kit.torchrun import Torchrun

TWO = ("--nproc-per-node", "2")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as `phalanx warm` has it; torchrun sets it itself for several ranks only
LOGS = ("--log-dir", "{work}/logs")
PORT = str(free_port())

WAYS = {"cold": (), "fresh": ("--fresh",), "warm": ()}

# Two halves, for two workers of pytest: each imports torch once.
FIRST = pytest.mark.xdist_group("compat 1")
SECOND = pytest.mark.xdist_group("compat 2")

# Each costs a run of torchrun, so one case often checks several properties; a difference names its field.
ALL = ("cold", "fresh", "warm")
CASES = [
    Case("1 rank", ways=("cold", "fresh")),
    Case("2 ranks", TWO, ranks=2, ways=ALL),
    Case("module", (*TWO, "-m"), script=("pkg.mod",), ranks=2, torch=False, ways=("cold", "warm")),
    Case("loaders", args=("--loaders",), env=ONE_THREAD, ways=("cold", "warm")),
    Case(
        "options and arguments",
        ("--standalone", "--nproc_per_node=2", "--max_restarts=1", "--role", "x"),
        args=("--", "-x", "", "a b", "é", "--nproc-per-node=9", "${local_rank}"),
        ranks=2,
        torch=False,
        ways=("fresh", "warm"),
    ),
    Case(
        "PET variables, threads given",
        (),
        env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "x", "PET_MAX_RESTARTS": "3", "OMP_NUM_THREADS": "3"},
        ranks=2,
    ),
    Case(
        "relative path, python variables",
        script=("../report.py",),
        cwd=f"{SCRIPTS}/pkg",
        env=ONE_THREAD
        | {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "PYTHONPATH": "/x", "PYTHONINTMAXSTRDIGITS": "0"},
        torch=False,
    ),
    Case(
        "absolute path, C locale, python variables",
        script=(f"{SCRIPTS}/report.py",),
        cwd="{work}",
        # All of them at once, because they need their own warm fork server.
        env=ONE_THREAD
        | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        | {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "PYTHONPATH": "/x", "PYTHONINTMAXSTRDIGITS": "0"},
        ways=("cold", "warm"),
    ),
    Case(
        "link to the script, other python",
        script=("link.py",),
        cwd="{work}",
        env=ONE_THREAD
        | {"PYTHON_EXEC": os.path.realpath(sys.executable), "PYTHONPATH": sysconfig.get_path("purelib")}
        # torch would look there for our backends, of which that folder has the name alone: they are installed in place.
        | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ways=("cold", "fresh"),
    ),
    Case(
        "link to the folder, inherited limits",
        before=(
            "sh",
            "-c",
            "umask 027; ulimit -n 512; ulimit -c 0; trap '' USR1 INT HUP QUIT; exec nice -n 3 \"$@\"",
            "sh",
        ),
        script=("folder/report.py",),
        cwd="{work}",
        env=ONE_THREAD,
        torch=False,
        ways=("cold", "fresh"),
    ),
    Case(
        "virtual local rank, filter",
        (*TWO, "--virtual-local-rank", "--local-ranks-filter", "1"),
        ranks=2,
        torch=False,
    ),
    Case(
        "virtual of given, log dir",
        (*TWO, "--virtual-local-rank", *LOGS),
        env={"CUDA_VISIBLE_DEVICES": "5,3"},
        ranks=2,
        torch=False,
    ),
    Case("redirects", (*TWO, "-r", "3", *LOGS), ranks=2, torch=False),
    Case("redirects of some", (*TWO, "-r", "0:1,1:2", *LOGS), ranks=2, torch=False, ways=("warm",)),
    Case("tee", (*TWO, "-t", "3", *LOGS), ranks=2, torch=False, ways=("warm",)),
    Case(
        "rdzv id",
        ("--rdzv-id", "job 7", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        env=ONE_THREAD,
        exact=("TORCHELASTIC_RUN_ID",),
        torch=False,
        ways=("warm",),
    ),
    Case(
        "master port, no devices",
        (*TWO, "--master-port", PORT),
        env={"CUDA_VISIBLE_DEVICES": ""},
        exact=("MASTER_PORT", "MASTER_ADDR"),
        ranks=2,
        torch=False,
        ways=("cold", "fresh"),
    ),
    Case(
        "no python, optimized",
        (*TWO, "--no-python"),
        script=(sys.executable, "report.py"),
        # Here, because it compiles torch again wherever that is imported, and such files would invalidate the warm
        # fork server.
        env={"PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        ranks=2,
        torch=False,
        ways=("fresh",),
    ),
    Case("terminal", TWO, ranks=2, torch=False, in_terminal=True, ways=("cold", "warm")),
    Case(
        "run path",
        ("--nproc-per-node", "1", "--run-path"),
        script=(f"{SCRIPTS}/report.py",),
        env=ONE_THREAD,
        # torchrun runs it inside a child of multiprocessing, where hardly anything is as in `python script.py`.
        only=("argv", "__name__", "__file__", "cwd", "umask", "env", "fd kinds", "excepthooks"),
        torch=False,
    ),
]


class Launchers:
    """Every way to start a run. torchrun and the warm fork server are imported once for all of them."""

    def __init__(self, torchrun: Torchrun, places: Env) -> None:
        self.torchrun = torchrun
        self.places = {
            name: place for name, place in places.items() if name not in ONE_THREAD
        }  # of the warm fork server
        self._observed: dict[str, Observed] = {}

    def observed(self, case: Case, folder: str) -> Observed:
        """Return torchrun's report of a case, created once."""
        if case.name not in self._observed:
            # With --run-path a worker comes from the interpreter that torchrun itself was started in.
            imported = None if "--run-path" in case.options else self.torchrun
            self._observed[case.name] = observe(TORCHRUN, case, folder, imported=imported)
        return self._observed[case.name]

    def run(self, name: str, *args: str, module: str = TORCHRUN[-1]) -> Result:
        if name == "torchrun":
            return self.torchrun(*args, module=module, cwd=SCRIPTS, env=ONE_THREAD)
        return run((*PHALANX, "run", *WAYS[name], *args), cwd=SCRIPTS, env=self.env(name))

    def start(self, name: str, *args: str) -> Handle:
        return start("run", *WAYS[name], *args, cwd=SCRIPTS, env=self.env(name))

    def env(self, name: str) -> Env:
        return {**self.places, **ONE_THREAD} if name == "warm" else ONE_THREAD


@pytest.fixture(scope="module")
def by() -> Iterator[Launchers]:
    with Torchrun() as torchrun, warm_environment() as places:
        yield Launchers(torchrun, places)


def work(factory: pytest.TempPathFactory, case: Case) -> str:
    """Return the folder of the case, the same for every launcher."""
    folder = factory.getbasetemp() / re.sub(r"\W", "-", case.name)
    if not folder.exists():
        folder.mkdir()
        (folder / "link.py").symlink_to(f"{SCRIPTS}/report.py")
        (folder / "folder").symlink_to(SCRIPTS)
    return str(folder)


@contextlib.contextmanager
def fork_server(env: Mapping[str, str], places: Env) -> Iterator[tuple[Env, int]]:
    """Return a warm fork server for these variables, the existing one if it matches; and its pid."""
    if any(name.startswith(("PYTHON", "LC_")) for name in env):
        with warm(env=env) as made:
            yield env, int(re.findall(r"pid (\d+)", made.out)[0])
    else:
        yield {**places, **env}, int(re.findall(r"pid (\d+)", phalanx("warm", "--list", env=places).out)[0])


@FIRST
@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}-{way}") for case in CASES for way in case.ways],
)
def test_worker_sees_what_it_sees_under_torchrun(
    case: Case, way: str, by: Launchers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = work(tmp_path_factory, case)
    theirs = by.observed(case, folder)
    pid = 0
    if way == "warm":
        with fork_server(case.env, by.places) as (env, pid):
            ours = observe((*PHALANX, "run"), case, folder, env=env)
    else:
        ours = observe((*PHALANX, "run", *WAYS[way]), case, folder)
    found = [*differences(theirs, ours, case, warm=way == "warm"), *oddities(ours, case)]
    assert not found, "\n".join(["a worker of phalanx is not as one of torchrun:", *found])
    if pid:
        assert pid in ours.reports[0]["ancestors"], "the warm fork server was not used"


@SECOND
def test_two_runs_of_one_fork_server_draw_other_numbers(by: Launchers, tmp_path: Path) -> None:
    case = Case("chance", TWO, ranks=2)
    runs = [observe((*PHALANX, "run"), case, str(tmp_path), env=by.places) for _ in range(2)]
    drawn = [report["chance"] for seen in runs for report in seen.reports.values()]
    for name in drawn[0]:
        assert len({numbers[name] for numbers in drawn}) == 4, name


# Ways to end a script, with the result of `python -u`: for every launcher.
ENDS = [
    ("boom.py", "0"),
    ("exit_code.py", "code", "3"),
    ("exit_code.py", "text"),
    ("exit_code.py", "signal", "SIGKILL"),
]
ENDS_OF = [
    ("cold", ENDS[0]),  # its others are below
    *((name, end) for name in ("torchrun", "fresh", "warm") for end in ENDS),
    ("warm", ("exit_code.py", "interrupt")),
    ("warm", ("exit_code.py", "signal", "SIGTERM")),
]
# The same for the usual ends, which one run covers.
WELL = [("normal",), ("none",), ("thread",), ("warning",)]
BADLY = [
    *(("code", "255"), ("code", "-1"), ("at once", "4"), ("group",), ("interrupt",)),
    *(("code", "3"), ("text",), ("signal", "SIGSEGV"), ("signal", "SIGTERM"), ("signal", "SIGKILL")),
    ("syntax",),  # the last: a syntax error is not retried
]


@functools.cache
def plain(*words: str, rank: int = 0) -> Result:
    return python(*words, cwd=SCRIPTS, env={"RANK": str(rank)})


def same_logs(logs: Path, expected: Result) -> None:
    assert (logs / "stdout.log").read_bytes() == expected.raw_out
    assert (logs / "stderr.log").read_bytes() == expected.raw_err


def exit_code(expected: Result) -> int:
    return expected.code if expected.code >= 0 else 128 - expected.code


@SECOND
@pytest.mark.parametrize(("name", "end"), ENDS_OF, ids=[f"{name}: {' '.join(end)}" for name, end in ENDS_OF])
def test_end_is_that_of_python(name: str, end: tuple[str, ...], by: Launchers, tmp_path: Path) -> None:
    expected = plain(*end)
    ours = by.run(name, "--nproc-per-node", "1", "-r", "3", "--log-dir", str(tmp_path), *end)
    (logs,) = tmp_path.glob("*/attempt_0/0")
    same_logs(logs, expected)
    if name != "torchrun":  # torchrun exits with 1 after every failure
        assert ours.code == exit_code(expected)


@SECOND
def test_every_good_end_is_that_of_python(by: Launchers, tmp_path: Path) -> None:
    words = ("exit_code.py", *_listed(WELL))
    ours = by.run("cold", "--nproc-per-node", str(len(WELL)), "-r", "3", "--log-dir", str(tmp_path), *words)
    assert ours.code == 0, ours.err
    for rank in range(len(WELL)):
        (logs,) = tmp_path.glob(f"*/attempt_0/{rank}")
        same_logs(logs, plain(*words, rank=rank))


@SECOND
def test_every_bad_end_is_that_of_python(by: Launchers, tmp_path: Path) -> None:
    words = ("exit_code.py", *_listed(BADLY))
    restarts = ("--max-restarts", str(len(BADLY) - 1))
    ours = by.run("cold", "--nproc-per-node", "1", *restarts, "-r", "3", "--log-dir", str(tmp_path), *words)
    (folder,) = tmp_path.iterdir()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    codes = [event["code"] for event in events if event["event"] == "worker-failed"]
    expected = [plain(*words, rank=place) for place in range(len(BADLY))]
    assert codes == [exit_code(each) for each in expected]
    assert ours.code == codes[-1]
    for attempt, each in enumerate(expected):
        same_logs(folder / f"attempt_{attempt}" / "0", each)


def _listed(ends: list[tuple[str, ...]]) -> list[str]:
    return [word for end in ends for word in (",", *end)][1:]


@SECOND
@pytest.mark.parametrize("way", WAYS)
def test_console_of_one_rank_is_that_of_python(way: str, by: Launchers) -> None:
    for end in (("boom.py", "0"), ("exit_code.py", "text"), ("bars.py", "4")):
        ours = by.run(way, *end)
        assert ours.raw_out == plain(*end).raw_out
        assert plain(*end).raw_err in ours.raw_err  # messages of phalanx come before or after


# The ways of use on one node in the documentation of torch.distributed.run.
EXAMPLES = {
    "single node, several workers": ("--standalone", "--nnodes=1", "--nproc-per-node=2"),
    "several on one node": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", *TWO),
    "fault tolerant": (
        *("--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=7"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    ),
    "elastic": (
        *("--nnodes=1:1", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=7"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    ),
}


@SECOND
@pytest.mark.parametrize("example", EXAMPLES)
def test_documented_example(example: str, by: Launchers) -> None:
    result = by.run("warm", *EXAMPLES[example], "allreduce.py")
    assert result.code == 0, result.err
    assert found_lines(r"rank \d of \d: \d+", result) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


@SECOND
def test_jobs_at_once_do_not_meet(by: Launchers) -> None:
    options = EXAMPLES["several on one node"]
    jobs = [by.start(name, *options, "allreduce.py", "50") for name in (*WAYS, "warm")]
    for job in jobs:
        assert job.wait() == 0, job.both
        assert sorted(re.findall(r"rank \d of \d: \d+", job.out)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


@SECOND
def test_training_step_is_the_same_to_the_last_digit(by: Launchers) -> None:
    """For the other ways, tests/faithful compares the numbers of a training."""
    results = {name: by.run(name, *EXAMPLES["elastic"], "ddp_step.py", "5") for name in ("torchrun", "fresh", "warm")}
    assert all(result.code == 0 for result in results.values()), results
    # As a set: if gloo does not release a rank in time, torchrun repeats both.
    found = {name: {*found_lines(r"rank \d loss \S+ weights \S+", result)} for name, result in results.items()}
    assert len(found["torchrun"]) == 2
    assert all(lines == found["torchrun"] for lines in found.values()), found


@SECOND
@pytest.mark.parametrize("name", ["torchrun", *WAYS])
def test_old_launcher_passes_the_local_rank(name: str, by: Launchers) -> None:
    options = () if name == "torchrun" else ("--pass-local-rank",)
    result = by.run(name, *options, *TWO, "oldway.py", "--lr", "0.5", module="torch.distributed.launch")
    assert result.code == 0, result.err
    lines = ["local rank 0 lr 0.5 RANK 0", "local rank 1 lr 0.5 RANK 1"]
    assert found_lines(r"local rank \d lr \S+ RANK \d", result) == lines


def found_lines(pattern: str, result: Result) -> list[str]:
    return sorted(re.findall(pattern, result.out))
