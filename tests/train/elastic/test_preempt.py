"""Preemption: a checkpoint, exit code 75, and the same command resumes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from phalanx.contract import events
from tests.kit import proc
from tests.kit.cli import Env, Handle, descendants, free_port, phalanx, python, start, until, warm_environment

pytestmark = pytest.mark.xdist_group("preempt")  # they share an undisturbed run
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "preempt.py")
STEPS = 40


def command(folder: Path, *words: str, ranks: int = 2, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    kept = ("--checkpoints", f"{folder}/kept")
    return ("run", "-g", str(ranks), "--cpu", *kept, *options, SCRIPT, str(folder), *words)


def steps(folder: Path, rank: int = 0) -> list[int]:
    """Return the steps that the script has completed."""
    with contextlib.suppress(FileNotFoundError):
        return [int(line.split()[0]) for line in (folder / f"steps.{rank}").read_text().splitlines()]
    return []


def wait_for_steps(folder: Path, job: Handle, *, after: int = 6) -> None:
    until(lambda: job.process.poll() is not None or after in steps(folder), 60, "some steps to be made")


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "kept").glob("step-*"))


def preempted(folder: Path, job: Handle) -> int:
    """Return the reported step at which it ended, and check that the newest checkpoint has that step."""
    assert job.wait() == 75, job.both
    (step,) = re.findall(rf"preempted by SIG\w+: step (\d+) is in {folder}/kept; the same command resumes", job.err)
    assert checkpoints(folder)[-1] == int(step)
    assert "after the training" not in job.out
    assert not list((folder / "kept").glob(".writing*"))
    return int(step)


class Trainings:
    """Runs of the script, and undisturbed ones to compare them with."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._ends: dict[int, list[str]] = {}

    def start(self, folder: Path, *words: str, ranks: int = 2, options: tuple[str, ...] = ()) -> Handle:
        return start(*command(folder, *words, ranks=ranks, options=options), env=self.env)

    def to_its_end(self, folder: Path, step: int, *words: str, ranks: int = 2) -> None:
        """Check that the same command continues after that step, with the result of an undisturbed run."""
        (folder / "continue").touch()
        done = phalanx(*command(folder, *words, ranks=ranks), env=self.env)
        assert done.code == 0, done.err
        assert f"resumed at step {step}, " in done.out
        assert done.out.count("after the training") == ranks
        assert [(folder / f"end.{rank}").read_text() for rank in range(ranks)] == self.undisturbed(ranks)

    def undisturbed(self, ranks: int) -> list[str]:
        if ranks not in self._ends:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "continue").touch()
                done = phalanx(*command(folder, ranks=ranks), env=self.env)
                assert done.code == 0, done.err
                self._ends[ranks] = [(folder / f"end.{rank}").read_text() for rank in range(ranks)]
        return self._ends[ranks]


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    with warm_environment("torch.distributed.checkpoint") as env:
        yield Trainings(env)


def all_processes(folder: Path, job: Handle) -> list[int]:
    """Return all processes of a run: its agent, its fork server and all descendants."""
    worker = proc.read(int((folder / "steps.0").read_text().split()[-1]))
    assert worker is not None
    return [job.pid, worker.parent, *descendants(worker.parent)]


@pytest.mark.extended
def test_a_preempted_run_resumes_after_its_last_step(tmp_path: Path, trainings: Trainings) -> None:
    job = trainings.start(tmp_path)
    wait_for_steps(tmp_path, job)
    job.signal(signal.SIGTERM)
    step = preempted(tmp_path, job)
    for rank in range(2):
        assert steps(tmp_path, rank) == list(range(1, step + 1))  # none of them is lost
    (folder,) = re.findall(r"output in (\S+)", job.err)
    recorded = [events.decode(line) for line in (Path(folder) / "events.jsonl").read_bytes().splitlines()]
    (event,) = [event for event in recorded if isinstance(event, events.Preempted)]
    assert event.step == step
    assert not [event for event in recorded if isinstance(event, events.FaultEvent)]
    assert recorded[-1] == replace(recorded[-1], code=75, preempted=True)
    name = Path(folder).name
    (shown,) = [line for line in phalanx("ps", "--all", env=trainings.env).out.splitlines() if name in line]
    assert " preempted " in shown
    assert f"{name}: preempted after" in phalanx("watch", "--plain", name, env=trainings.env).out
    trainings.to_its_end(tmp_path, step)
    for rank in range(2):
        assert steps(tmp_path, rank) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("name", "words", "ranks"),
    [pytest.param("TERM", ("workers",), 2, marks=pytest.mark.extended), ("USR1", ("raw",), 1)],
)
def test_a_scheduler_may_signal_every_process(
    tmp_path: Path, name: str, words: tuple[str, ...], ranks: int, trainings: Trainings
) -> None:
    options = ("--preempt-signal", name)
    # Processes that load data die from it, and leave temporary files there.
    env = {"TMPDIR": str(tmp_path)} if words == ("workers",) else {**trainings.env, "OMP_NUM_THREADS": "1"}
    job = start(*command(tmp_path, *words, ranks=ranks, options=options), env=env)
    wait_for_steps(tmp_path, job)
    for pid in all_processes(tmp_path, job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{name}"])
    step = preempted(tmp_path, job)
    assert step >= max(steps(tmp_path))
    if words == ("workers",):
        trainings.to_its_end(tmp_path, step, *words, ranks=ranks)


@pytest.mark.extended
def test_a_forward_that_preemption_interrupts_leaves_no_trace(tmp_path: Path, trainings: Trainings) -> None:
    """A script with its own data halts in `run.step`, after a forward: the script compares what it has counted."""
    job = trainings.start(tmp_path, "alone")
    wait_for_steps(tmp_path, job)
    job.signal(signal.SIGTERM)
    step = preempted(tmp_path, job)
    (tmp_path / "continue").touch()
    done = phalanx(*command(tmp_path, "alone"), env=trainings.env)
    assert done.code == 0, done.err
    assert f"resumed at step {step}, " in done.out


@pytest.mark.extended
def test_a_rank_that_hangs_in_a_collective_is_interrupted(tmp_path: Path, trainings: Trainings) -> None:
    job = trainings.start(tmp_path, "hang", options=("--grace", "12s"))
    wait_for_steps(tmp_path, job)
    until((tmp_path / "hung").exists, 60, "rank 1 to hang")
    job.signal(signal.SIGTERM)
    trainings.to_its_end(tmp_path, preempted(tmp_path, job), "hang")


@pytest.mark.extended
def test_a_death_while_the_checkpoint_is_written(tmp_path: Path, trainings: Trainings) -> None:
    job = trainings.start(tmp_path, "slow")
    wait_for_steps(tmp_path, job)
    job.signal(signal.SIGTERM)
    until((tmp_path / "saving").exists, 60, "the checkpoint to be written")
    os.kill(int((tmp_path / "steps.1").read_text().split()[-1]), signal.SIGKILL)
    assert preempted(tmp_path, job) == max(steps(tmp_path))


@pytest.mark.extended
def test_preemption_while_a_checkpoint_is_written(tmp_path: Path, trainings: Trainings) -> None:
    """It is also no failure that all ranks end with an error, once it is written."""
    job = trainings.start(tmp_path, "slow", "often", "badly", options=("--grace", "10m"))
    until((tmp_path / "saving").exists, 60, "a checkpoint to be written")
    job.signal(signal.SIGTERM)
    assert preempted(tmp_path, job) == max(steps(tmp_path), default=1)


@pytest.mark.extended
@pytest.mark.parametrize("how", ["twice", "late"])
def test_who_does_not_get_to_a_step_ends_as_ever(tmp_path: Path, how: str, trainings: Trainings) -> None:
    # Within half a second a stuck rank is not replaced, and its state not saved.
    job = trainings.start(tmp_path, "stuck", "slow", options=("--grace", "1s" if how == "late" else "10m"))
    wait_for_steps(tmp_path, job)
    job.signal(signal.SIGTERM)
    job.wait_for("a checkpoint at the next step")
    if how == "twice":
        while job.process.poll() is None:  # a signal that follows at once counts as the same one
            job.signal(signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                job.wait(0.5)
    assert job.wait() == 143, job.both
    assert (f"no checkpoint was made in 1 s (--grace): what {tmp_path}/kept has remains" in job.err) == (how == "late")
    assert checkpoints(tmp_path) == []


def test_without_a_folder_there_is_no_checkpoint(tmp_path: Path, trainings: Trainings) -> None:
    job = start("run", "-g", "2", "--cpu", SCRIPT, str(tmp_path), env=trainings.env)
    wait_for_steps(tmp_path, job)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143, job.both
    assert "SIGTERM received; no folder for checkpoints is known (--checkpoints DIR" in job.err


def test_any_other_script_ends_as_ever(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    job = start("run", "-g", "2", "--cpu", "--fresh", "--checkpoints", str(tmp_path), str(script))
    job.wait_for("ready", 2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143, job.both
    assert "checkpoint" not in job.err


@pytest.mark.extended
def test_a_signal_at_either_node_preempts_the_run(tmp_path: Path, trainings: Trainings) -> None:
    port = free_port()
    same = ("-n", "2", "-g", "1", "--master", f"127.0.0.1:{port}", "--cpu", "--checkpoints", f"{tmp_path}/kept")
    first, second = [
        start("run", *same, "-i", str(node), SCRIPT, str(tmp_path), env=trainings.env) for node in range(2)
    ]
    wait_for_steps(tmp_path, first)
    second.signal(signal.SIGTERM)
    step = preempted(tmp_path, first)
    assert second.wait() == 75, second.both
    assert "node 1" in first.err
    assert steps(tmp_path) == steps(tmp_path, 1) == list(range(1, step + 1))


HANDLERS = """
import os, signal, time
from phalanx.worker.ignored_signals import IgnoredSignals as Ignoring

signal.signal(signal.SIGUSR2, lambda *_: print("mine", flush=True))
ignoring = Ignoring([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
print("child", os.waitpid(child, 0)[1], flush=True)
ignoring.die(signal.SIGUSR2)
print("alive", flush=True)
ignoring.die(signal.SIGTERM)
time.sleep(60)
"""


def test_a_worker_ignores_what_is_not_the_scripts_own() -> None:
    done = python("-c", HANDLERS)
    assert done.out.split() == ["mine", "child", "15", "alive"]
    assert done.code == -signal.SIGTERM
