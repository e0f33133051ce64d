"""A worker cannot tell whether torchrun, phalanx or plain python started it.

torchrun is run once for each case, and its report compared with those of every way in which phalanx starts workers.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.cli import PHALANX, TORCHRUN, Result, free_port, python, run, start, warm
from tests.kit.reports import SCRIPTS, Case, Observed, differences, observe, oddities

TWO = ("--nproc-per-node", "2")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as `phalanx warm` has it; torchrun sets it itself for several ranks only
LOGS = ("--log-dir", "{work}/logs")
PORT = str(free_port())

WAYS = {"cold": (), "fresh": ("--fresh",), "warm": ()}

# Each costs a run of torchrun, so that one case often asks several questions; a difference names its field.
ALL = ("cold", "fresh", "warm")
CASES = [
    Case("1 rank", ways=("cold", "fresh")),
    Case("2 ranks", TWO, ranks=2, ways=ALL),
    Case("module", (*TWO, "-m"), script=("pkg.mod",), ranks=2, ways=("cold", "warm")),
    Case("loaders", args=("--loaders",), env=ONE_THREAD, ways=("cold", "warm")),
    Case(
        "options and arguments",
        ("--standalone", "--nproc_per_node=2", "--max_restarts=1", "--role", "x"),
        args=("--", "-x", "", "a b", "é", "--nproc-per-node=9", "${local_rank}"),
        ranks=2,
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
        env=ONE_THREAD | {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "PYTHONPATH": "/x", "PYTHONOPTIMIZE": "1"},
        ways=("cold", "warm"),
    ),
    Case(
        "absolute path, C locale",
        script=(f"{SCRIPTS}/report.py",),
        cwd="{work}",
        env=ONE_THREAD | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        ways=("cold", "warm"),
    ),
    Case(
        "link to the script, other python",
        script=("link.py",),
        cwd="{work}",
        env=ONE_THREAD | {"PYTHON_EXEC": os.path.realpath(sys.executable), "PYTHONPATH": sysconfig.get_path("purelib")},
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
        ways=("cold", "fresh"),
    ),
    Case("virtual local rank, filter", (*TWO, "--virtual-local-rank", "--local-ranks-filter", "1"), ranks=2),
    Case(
        "virtual of given, log dir",
        (*TWO, "--virtual-local-rank", *LOGS),
        env={"CUDA_VISIBLE_DEVICES": "5,3"},
        ranks=2,
    ),
    Case("redirects", (*TWO, "-r", "3", *LOGS), ranks=2),
    Case("redirects of some", (*TWO, "-r", "0:1,1:2", *LOGS), ranks=2),
    Case("tee", (*TWO, "-t", "3", *LOGS), ranks=2),
    Case(
        "rdzv id",
        ("--rdzv-id", "job 7", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        env=ONE_THREAD,
        exact=("TORCHELASTIC_RUN_ID",),
    ),
    Case(
        "master port, no devices",
        (*TWO, "--master-port", PORT),
        env={"CUDA_VISIBLE_DEVICES": ""},
        exact=("MASTER_PORT", "MASTER_ADDR"),
        ranks=2,
        ways=("cold", "fresh"),
    ),
    Case("no python", (*TWO, "--no-python"), script=(sys.executable, "report.py"), ranks=2, ways=("fresh",)),
    Case("terminal", TWO, ranks=2, in_terminal=True, ways=("cold", "warm")),
    Case(
        "run path",
        (*TWO, "--run-path"),
        script=(f"{SCRIPTS}/report.py",),
        ranks=2,
        # torchrun runs it inside a child of multiprocessing, where hardly anything is as in `python script.py`.
        only=("argv", "__name__", "__file__", "cwd", "umask", "env", "fd kinds", "excepthooks"),
    ),
]


@pytest.fixture(scope="session")
def torchruns(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Observed]:
    """torchrun's report of a case, made once."""
    made: dict[str, Observed] = {}

    def get(case: Case) -> Observed:
        if case.name not in made:
            made[case.name] = observe(TORCHRUN, case, work(tmp_path_factory, case))
        return made[case.name]

    return get


def work(factory: pytest.TempPathFactory, case: Case) -> str:
    """The folder of the case, the same for every launcher."""
    folder = factory.getbasetemp() / re.sub(r"\W", "-", case.name)
    if not folder.exists():
        folder.mkdir()
        (folder / "link.py").symlink_to(f"{SCRIPTS}/report.py")
        (folder / "folder").symlink_to(SCRIPTS)
    return str(folder)


class Launcher(NamedTuple):
    words: tuple[str, ...]
    env: dict[str, str]
    zygote: int = 0  # the pid of the warm one


@contextlib.contextmanager
def launcher(name: str, env: Mapping[str, str] = ONE_THREAD) -> Iterator[Launcher]:
    """How to start a run this way."""
    if name == "torchrun":
        with tempfile.TemporaryDirectory() as tmp:  # where it leaves its log folders
            yield Launcher(TORCHRUN, {**env, "TMPDIR": tmp})
    elif name == "warm":
        with warm(env=env) as kept:
            yield Launcher((*PHALANX, "run"), {**env}, int(re.findall(r"pid (\d+)", kept.out)[0]))
    else:
        yield Launcher((*PHALANX, "run", *WAYS[name]), {**env})


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, id=f"{case.name}-{way}", marks=pytest.mark.xdist_group(case.name))
        for case in CASES
        for way in case.ways
    ],
)
def test_worker_sees_what_it_sees_under_torchrun(
    case: Case,
    way: str,
    torchruns: Callable[[Case], Observed],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    theirs = torchruns(case)
    with launcher(way, case.env) as by:
        ours = observe(by.words, case, work(tmp_path_factory, case))
    found = [*differences(theirs, ours, case, warm=way == "warm"), *oddities(ours, case)]
    assert not found, "\n".join(["a worker of phalanx is not as one of torchrun:", *found])
    if by.zygote:
        assert by.zygote in ours.reports[0]["ancestors"], "the warm zygote was not used"


def test_two_runs_of_one_zygote_draw_other_numbers(tmp_path: Path) -> None:
    case = Case("chance", TWO, env=ONE_THREAD, ranks=2)
    with launcher("warm") as by:
        runs = [observe(by.words, case, str(tmp_path)) for _ in range(2)]
    drawn = [report["chance"] for seen in runs for report in seen.reports.values()]
    for name in drawn[0]:
        assert len({numbers[name] for numbers in drawn}) == 4, name


# How a script ends, and what `python -u` says then. The first few for every launcher.
ENDS = [
    ("boom.py", "0"),
    ("exit_code.py", "code", "3"),
    ("exit_code.py", "text"),
    ("exit_code.py", "signal", "SIGKILL"),
    ("exit_code.py", "normal"),
    ("exit_code.py", "none"),
    ("exit_code.py", "code", "255"),
    ("exit_code.py", "code", "-1"),
    ("exit_code.py", "at once", "4"),
    ("exit_code.py", "thread"),
    ("exit_code.py", "warning"),
    ("exit_code.py", "syntax"),
    ("exit_code.py", "group"),
    ("exit_code.py", "interrupt"),
    ("exit_code.py", "signal", "SIGSEGV"),
    ("exit_code.py", "signal", "SIGTERM"),
]
ENDS_OF = [("cold", end) for end in ENDS] + [(n, end) for n in ("torchrun", "fresh", "warm") for end in ENDS[:4]]


@pytest.mark.parametrize(("name", "end"), ENDS_OF, ids=[f"{name}: {' '.join(end)}" for name, end in ENDS_OF])
def test_end_is_that_of_python(name: str, end: tuple[str, ...], tmp_path: Path) -> None:
    plain = python(*end, cwd=SCRIPTS)
    options = ("--nproc-per-node", "1", "-r", "3", "--log-dir", str(tmp_path))
    with launcher(name) as by:
        ours = run((*by.words, *options, *end), cwd=SCRIPTS, env=by.env)
    logs = {path.name: path.read_bytes() for path in tmp_path.glob("*/attempt_0/0/*.log")}
    assert logs["stdout.log"] == plain.raw_out
    assert logs["stderr.log"] == plain.raw_err
    if name != "torchrun":  # which answers every failure with 1
        assert ours.code == (plain.code if plain.code >= 0 else 128 - plain.code)


@pytest.mark.parametrize("way", WAYS)
def test_console_of_one_rank_is_that_of_python(way: str) -> None:
    for end in (("boom.py", "0"), ("exit_code.py", "text"), ("bars.py", "4")):
        plain = python(*end, cwd=SCRIPTS)
        with launcher(way) as by:
            ours = run((*by.words, *end), cwd=SCRIPTS, env=by.env)
        assert ours.raw_out == plain.raw_out
        assert plain.raw_err in ours.raw_err  # what phalanx has to say itself comes before or after


# The ways in which torch.distributed.run says in its own documentation that it can be used on one node.
ALL_BUT_COLD = ("torchrun", "fresh", "warm")
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


@pytest.mark.parametrize(
    ("example", "name"), [*((example, "cold") for example in EXAMPLES), *(("elastic", name) for name in ALL_BUT_COLD)]
)
def test_documented_example(example: str, name: str) -> None:
    with launcher(name) as by:
        result = run((*by.words, *EXAMPLES[example], "allreduce.py"), cwd=SCRIPTS, env=by.env)
    assert result.code == 0, result.err
    assert _said(r"rank \d of \d: \d+", result) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


@pytest.mark.parametrize("name", WAYS)
def test_two_jobs_at_once_do_not_meet(name: str) -> None:
    options = EXAMPLES["several on one node"]
    with launcher(name) as by:
        jobs = [start(words=(*by.words, *options, "allreduce.py", "50"), cwd=SCRIPTS, env=by.env) for _ in range(2)]
        for job in jobs:
            assert job.wait() == 0, job.both
            assert sorted(re.findall(r"rank \d of \d: \d+", job.out)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_training_step_is_the_same_to_the_last_digit() -> None:
    found = {}
    for name in ("torchrun", *WAYS):
        with launcher(name) as by:
            result = run((*by.words, *TWO, "ddp_step.py", "5"), cwd=SCRIPTS, env=by.env)
        found[name] = _said(r"rank \d loss \S+ weights \S+", result)
    assert len(found["torchrun"]) == 2
    assert all(said == found["torchrun"] for said in found.values()), found


@pytest.mark.parametrize("name", ["torchrun", *WAYS])
def test_old_launcher_passes_the_local_rank(name: str) -> None:
    with launcher(name) as by:
        if name == "torchrun":
            words = (sys.executable, "-m", "torch.distributed.launch")
        else:
            words = (*by.words, "--pass-local-rank")
        result = run((*words, *TWO, "oldway.py", "--lr", "0.5"), cwd=SCRIPTS, env=by.env)
    assert result.code == 0, result.err
    said = ["local rank 0 lr 0.5 RANK 0", "local rank 1 lr 0.5 RANK 1"]
    assert _said(r"local rank \d lr \S+ RANK \d", result) == said


def _said(pattern: str, result: Result) -> list[str]:
    return sorted(re.findall(pattern, result.out))
