"""`phalanx bench recover`: how it evaluates reports of ranks, and one small real run."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.recover.benchmark import main
from benchmarks.recover.launchers import RECOVERY_LAUNCHERS
from benchmarks.recover.progress import (
    Kill,
    ProgressRecord,
    RecoveryTimes,
    cpu_seconds,
    newest_step,
    parse,
    recovery_times,
    settled_group,
    step_times,
)
from benchmarks.recover.results import GoodputSample, KillSample, RecoverResults, rows, targets
from benchmarks.training.step import StepTimes, label
from phalanx.errors import OptionError
from tests.kit.cli import phalanx

KILL = Kill(rank=1, pid=11, group=0, time=100.0)

BEFORE = """
met 0 10 0 0 90.0 1.0
ready 0 10 0 0 90.5 1.0
step 0 10 0 1 97.0 1.0
step 1 11 0 1 97.5 1.0
step 0 10 0 2 98.0 1.5
step 1 11 0 2 98.5 1.5
step 0 10 0 3 99.0 2.0
step 1 11 0 3 99.5 2.0
"""
AFTER = """
step 0 10 0 4 100.1 2.5
met 0 10 1 0 100.2 2.5
met 1 12 1 0 100.4 0.1
ready 1 12 1 0 100.6 0.1
ready 0 10 1 0 100.5 2.5
step 0 10 1 5 101.0 3.0
step 1 12 1 5 101.2 0.5
step 0 10 1 6 101.5 3.5
"""


def test_marks_are_lines() -> None:
    assert parse("step 3 4711 2 17 12.500000 3.25\nmet 0 1 0 0 1.0 0\n") == [
        ProgressRecord("step", 3, 4711, 2, 17, 12.5, 3.25),
        ProgressRecord("met", 0, 1, 0, 0, 1.0, 0.0),
    ]
    assert parse("") == []


def test_a_recovery_is_over_when_every_rank_has_stepped_again() -> None:
    records = parse(BEFORE + AFTER)
    assert recovery_times(records, KILL, 2) == RecoveryTimes(first=1.0, whole=1.2, met=0.4, ready=0.6, lost=0)
    assert recovery_times(parse(BEFORE), KILL, 2) is None
    assert recovery_times(records[:-2], KILL, 2) is None  # the new rank 1 has not reported yet
    assert recovery_times(records, KILL, 3) is None
    # A late report of the dead process does not count for its replacement.
    late = parse(BEFORE + "step 0 10 1 5 101.0 3.0\nstep 1 11 1 5 101.2 0.5\n")
    assert recovery_times(late, KILL, 2) is None


@pytest.mark.parametrize(("begins", "lost"), [(5, 0), (4, 1), (1, 4)])
def test_steps_that_survivors_had_committed_and_that_were_done_again(begins: int, lost: int) -> None:
    again = f"step 0 10 0 4 100.1 1\nstep 0 10 1 {begins} 101.0 1\nstep 1 12 1 {begins} 101.2 1\n"
    found = recovery_times(parse(BEFORE + again), KILL, 2)
    assert found is not None
    assert found.lost == lost


def test_a_step_of_the_dead_rank_alone_does_not_count() -> None:
    alone = "step 1 11 0 4 99.9 1\nstep 0 10 1 4 101.0 1\nstep 1 12 1 4 101.2 1\n"
    found = recovery_times(parse(BEFORE + alone), KILL, 2)
    assert found is not None
    assert found.lost == 0


def test_when_a_group_has_settled() -> None:
    records = parse(BEFORE + AFTER)
    assert settled_group(parse(BEFORE), 2, 3) == 0
    assert settled_group(parse(BEFORE), 2, 4) is None
    assert settled_group(parse(BEFORE), 3, 1) is None
    assert settled_group(records, 2, 1) == 1
    assert settled_group(records, 2, 2) is None
    assert settled_group([], 2, 1) is None


def test_step_times_and_cpu_seconds() -> None:
    records = [ProgressRecord("step", 0, 10, 0, number, float(number**2), 0.0) for number in range(1, 6)]
    assert step_times(records) == [7.0, 9.0]  # the first steps of a group are left out
    assert (newest_step(records, 9.5), newest_step(records, 1.0)) == (3, 0)
    assert cpu_seconds(parse(AFTER), {0: 2.0, 1: 0.25}) == 1.75
    assert cpu_seconds(parse(AFTER), {0: 2.0}) == 1.5


def measured(*samples: KillSample) -> RecoverResults:
    results = RecoverResults()
    results.samples = list(samples)
    return results


OPTIONS = Namespace(ranks=4, params=10_000_000, every=10.0, faults=2, seed=1, gpu=False, gpus=[], strategy="ddp")


def killed(name: str, whole: float, met: float = 0.1, lost: int = 0) -> KillSample:
    return KillSample(name, 1, 0, first=whole, whole=whole, met=met, ready=met, step=0.1, lost=lost)


def test_rows_are_medians_of_what_was_recovered() -> None:
    torchrun = [killed("torchrun", 6.0), KillSample("torchrun", 1, 2, failure="boom"), killed("torchrun", 4.0, lost=1)]
    ours, theirs = rows([*torchrun, killed("phalanx", 0.2)])
    assert (ours.contender, ours.recovered, ours.kills, ours.steps) == ("phalanx", 1, 1, 2.0)
    assert (theirs.recovered, theirs.kills, theirs.whole, theirs.lost) == (2, 3, (4.0, 6.0), 1)


@pytest.mark.parametrize(
    ("samples", "verdicts"),
    [
        ([killed("phalanx", 0.2), killed("restart", 3.0, met=1.4)], [True, True, True]),
        ([killed("phalanx", 0.4, lost=1), killed("restart", 3.0, met=1.6)], [False, False, False]),
        ([killed("phalanx", 0.2), KillSample("phalanx", 1, 1, failure="boom")], [False, True, None]),
        ([KillSample("phalanx", 1, failure="boom")], [False, None, None]),
        ([], [None, None, None]),
    ],
    ids=["met", "missed", "one failed", "all failed", "nothing"],
)
def test_targets_of_a_kill(samples: list[KillSample], verdicts: list[bool | None]) -> None:
    assert [target.met for target in targets(measured(*samples), OPTIONS)] == [*verdicts, None, None, None]


def test_the_other_promises() -> None:
    results = measured()
    results.pairs = [GoodputSample(1, 100, 95), GoodputSample(2, 100, 92), GoodputSample(3, 100, 20)]
    results.ready = [StepTimes("ready", "raw", (1.0, 1.0)), StepTimes("ready", "phalanx", (1.005, 1.005))]
    results.faults = [killed("phalanx", 0.2), KillSample("phalanx", 2, 1, failure="boom")]
    *_, goodput, ready, faults = targets(results, OPTIONS)
    assert (goodput.met, ready.met, faults.met) == (True, True, False)
    assert goodput.evidence == "92.0% (20.0%..95.0%)"
    assert faults.evidence == "1 of 2"


def test_a_target_names_the_strategy_that_is_compared() -> None:
    results = measured()
    without = targets(results, Namespace(**vars(OPTIONS) | {"strategy": "fsdp"}))[-2]
    results.ready = [StepTimes("ready", "raw", (1.0, 1.0)), StepTimes("ready", "phalanx", (1.005, 1.005))]
    judged = targets(results, Namespace(**vars(OPTIONS) | {"strategy": "hsdp"}))[-2]
    assert without.what.endswith("of raw PyTorch FSDP")
    assert judged.what.endswith("of raw PyTorch HSDP")
    assert [label(name, "fsdp") for name in ("raw", "again", "phalanx")] == [
        "raw PyTorch FSDP",
        "raw PyTorch FSDP, again",
        "phalanx",
    ]


def test_how_torchrun_is_started() -> None:
    torchrun = RECOVERY_LAUNCHERS["torchrun"]
    line = torchrun.command(4)
    assert line[1:7] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts"]
    assert line[-1].endswith("scripts/recover.py")
    assert torchrun.variables == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert RECOVERY_LAUNCHERS["restart"].command(4)[1:8] == ["-P", "-m", "phalanx", "run", "-g", "4", "--cpu"]


@pytest.mark.parametrize(
    "argv",
    [["--ranks", "0"], ["--faults", "-1"], ["--every", "0"], ["--only", "luck"], ["--contenders", "phalanx,horovod"]],
)
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


@pytest.mark.extended
def test_a_small_real_run(tmp_path: Path) -> None:
    file = tmp_path / "recover.json"
    done = phalanx(
        *("bench", "recover", "--quick", "--ranks", "2", "--contenders", "phalanx,restart", "--json", str(file))
    )
    # One kill on a busy machine cannot show whether targets are met.
    assert done.code in (0, 1), done.err
    data = json.loads(file.read_text())
    assert (data["benchmark"], data["settings"]["ranks"], data["settings"]["rounds"]) == ("recover", 2, 1)
    assert {sample["contender"] for sample in data["samples"]} == {"phalanx", "restart"}
    for sample in (*data["samples"], *data["faults"]):
        assert sample["failure"] == ""
        assert 0 < sample["met"] <= sample["ready"] <= sample["whole"] < done.seconds
        assert 0 < sample["first"] <= sample["whole"]
    ours, plain = data["rows"]
    assert (ours["contender"], ours["recovered"], ours["kills"], ours["lost"]) == ("phalanx", 1, 1, 0)
    assert (plain["contender"], plain["recovered"], plain["kills"]) == ("restart", 1, 1)
    assert len(data["faults"]) == 2
    assert all(pair["undisturbed"] > 0 for pair in data["goodput"])
    assert [row["contender"] for row in data["ready"]] == ["raw", "again", "phalanx"] * 2
    assert all(row["ratio"] > 0 for row in data["ready"])
    assert "2 of 2" in done.out
    assert "failed" not in done.out
