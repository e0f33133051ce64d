"""`phalanx bench launch`: how it evaluates times, and one small real run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import launchers
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.machine import machine_info
from benchmarks.common.options import positive_numbers
from benchmarks.common.ratios import rotated
from benchmarks.launch import report
from benchmarks.launch.benchmark import main, schedule
from benchmarks.launch.results import LaunchCase, LaunchResults, LaunchSample, LaunchSettings, LaunchTimes, targets
from benchmarks.launch.runner import read_stamps
from phalanx.errors import OptionError
from tests.kit.cli import phalanx

ALL = LaunchSettings(ranks=(2, 8, 16), repeat=3, contenders=tuple(LAUNCHERS), ends=("allreduce", "adamw"))

# contender -> seconds to the first all_reduce on 2, 8 and 16 ranks; a step takes twice as long
GOOD = {
    "phalanx": (1.5, 1.55, 2.0),
    "warm": (0.2, 0.3, 0.4),
    "torchrun": (4.0, 8.0, 16.0),
    "accelerate": (5.0, 9.0, 17.0),
}


def made(
    settings: LaunchSettings = ALL, times: dict[str, tuple[float, ...]] = GOOD, failing: LaunchCase | None = None
) -> LaunchResults:
    """Return rounds slightly below, at and above the given times."""
    results = LaunchResults(settings)
    for number, noise in enumerate((0.9, 1.0, 1.1), 1):
        results.imports.append(LaunchSample(LaunchCase("python", "import", 1), number, 1.3 * noise, 1.4 * noise))
        for case in schedule(settings, number):
            base = times[case.contender][settings.ranks.index(case.ranks)] * (2 if case.end == "adamw" else 1)
            if case == failing and number == 2:
                results.samples.append(LaunchSample(case, number, None, None, "exit code 1: boom"))
            else:
                results.samples.append(LaunchSample(case, number, base * noise, base * noise + 0.5))
    return results


def reported(results: LaunchResults) -> report.LaunchReport:
    return report.LaunchReport(results, machine_info(), (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("times", "failed", "median", "text", "narrow"),
    [
        ((), 0, None, "-", "-"),
        ((1.0,), 0, 1.0, "1.00", "1.00"),
        ((3.0, 1.0, 2.0), 0, 2.0, "2.00 (1.00..3.00)", "2.00\n1.00..3.00"),
        ((1.0, 2.0), 0, 1.5, "1.50 (1.00..2.00)", "1.50\n1.00..2.00"),
        ((9.99, 12.34), 0, 11.165, "11.2 (9.99..12.3)", "11.2\n9.99..12.3"),
        ((1.0,), 2, 1.0, "1.00, 2 of 3 failed", "1.00\n2 of 3\nfailed"),
        ((), 3, None, "3 of 3 failed", "3 of 3\nfailed"),
    ],
)
def test_times_of_a_case(times: tuple[float, ...], failed: int, median: float | None, text: str, narrow: str) -> None:
    of_case = LaunchTimes(times, failed)
    assert of_case.median == pytest.approx(median)
    assert report.spread(of_case) == text
    assert report.stacked(of_case) == narrow


@pytest.mark.parametrize(("turn", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc"), (7, "bca")])
def test_rotation(turn: int, order: str) -> None:
    assert "".join(rotated("abc", turn)) == order


def test_a_round_has_every_case_once() -> None:
    for number in range(4):
        cases = list(schedule(ALL, number))
        assert len(cases) == len(set(cases)) == 4 * 2 * 3


def test_every_contender_is_first_equally_often() -> None:
    firsts = [list(schedule(ALL, number))[::4] for number in range(4)]
    for place in range(6):
        assert {cases[place].contender for cases in firsts} == set(LAUNCHERS)


def changed(name: str, ranks: int, seconds: float) -> dict[str, tuple[float, ...]]:
    times = list(GOOD[name])
    times[ALL.ranks.index(ranks)] = seconds
    return {**GOOD, name: tuple(times)}


@pytest.mark.parametrize(
    ("times", "missed"),
    [
        (GOOD, []),
        (changed("torchrun", 8, 7.7), ["first all_reduce, 8 ranks: at most 1/5 of torchrun's"]),
        (
            changed("torchrun", 8, 6.0),
            [
                "first all_reduce, 8 ranks: at most 1/5 of torchrun's",
                "first AdamW step, 8 ranks: at most 1/4 of torchrun's",
            ],
        ),
        (
            changed("phalanx", 16, 2.3),
            ["first all_reduce: 16 ranks at most 1.5 of 2", "first AdamW step: 16 ranks at most 1.5 of 2"],
        ),
        (
            changed("warm", 8, 0.5),
            ["first all_reduce, 8 ranks, warm: below 0.5 s", "first AdamW step, 8 ranks, warm: below 1 s"],
        ),
    ],
)
def test_targets(times: dict[str, tuple[float, ...]], missed: list[str]) -> None:
    judged = targets(made(times=times))
    assert [target.what for target in judged if target.met is False] == missed
    assert None not in [target.met for target in judged]


def test_a_target_names_its_measure() -> None:
    first, one_import, *_, warm, _ = targets(made())
    assert first.evidence == "1.55 s / 8.00 s = 0.194"
    assert one_import.evidence == "1.55 s / 1.30 s = 1.192"
    assert warm.evidence == "0.300 s"


def test_what_failed_or_was_not_run_is_not_judged() -> None:
    failed = targets(made(failing=LaunchCase("phalanx", "allreduce", 8)))
    assert [(target.met, target.evidence) for target in failed[:2]] == [
        (None, "1 of 6 launches failed"),
        (None, "1 of 6 launches failed"),
    ]
    assert failed[2].met is True
    absent = targets(made(LaunchSettings((2,), 3, ("torchrun",), ("allreduce",))))
    assert {(target.met, target.evidence) for target in absent} == {(None, "not part of this run")}


def test_markdown() -> None:
    text = reported(made(failing=LaunchCase("accelerate", "adamw", 16))).markdown()
    for line in (
        "| phalanx | all_reduce | 1.50 (1.35..1.65) | 1.55 (1.40..1.71) | 2.00 (1.80..2.20) |",
        "| phalanx | all_reduce | 2.7x | 5.2x | 8.0x |",
        "| torchrun | all_reduce | 4.50 (4.10..4.90) | 8.50 (7.70..9.30) | 16.5 (14.9..18.1) |",
        "| first all_reduce, 8 ranks: at most 1/5 of torchrun's | 1.55 s / 8.00 s = 0.194 | met |",
        "- accelerate, adamw, 16 ranks, round 2: exit code 1: boom",
    ):
        assert line in text.splitlines()
    assert "| 34.0 (30.6..37.4), 1 of 3 failed |" in text
    assert "| torchrun | all_reduce | 1.0x" not in text


@pytest.mark.parametrize(("load", "busy"), [(0.2, False), (3.0, True)])
def test_a_busy_machine_is_said_to_be_one(load: float, busy: bool) -> None:
    machine = replace(machine_info(), cores=2, load_before=(load, 0.0, 0.0))
    text = report.LaunchReport(made(), machine, (0.0, 0.0, 0.0)).markdown()
    assert ("This machine was busy" in text) is busy


@pytest.mark.parametrize(
    ("rows", "ranks", "reached", "wrong"),
    [
        ("0 5.0 2\n1 6.5 2\n", 2, 6.5, ""),
        ("", 2, 0.0, "0 of 2 ranks reached the end point"),
        ("0 5.0 2\n", 2, 0.0, "1 of 2 ranks reached the end point"),
        ("0 5.0 1\n0 6.0 1\n", 2, 0.0, "2 of 2 ranks reached the end point"),
        ("0 5.0 1\n1 6.0 1\n", 2, 0.0, "a rank met 1 ranks instead of 2"),
    ],
)
def test_only_a_complete_group_counts(tmp_path: Path, rows: str, ranks: int, reached: float, wrong: str) -> None:
    stamps = tmp_path / "stamps"
    stamps.write_text(rows)
    assert read_stamps(str(stamps), ranks) == (reached, wrong)


def test_the_environment_is_the_same_for_all() -> None:
    inherited = {"PATH": "/bin", "RANK": "3", "PET_NNODES": "2", "PHALANX_HOME": "/mine", "OMP_NUM_THREADS": "8"}
    made = {name: launchers.environment(LAUNCHERS[name], 2, inherited, "/tmp/x") for name in LAUNCHERS}
    homes = {environ.pop("PHALANX_HOME") for environ in made.values()}
    assert len(homes) == 4
    assert "/mine" not in homes
    assert all(environ == made["torchrun"] for environ in made.values())
    assert set(made["torchrun"]) == {"PATH", "OMP_NUM_THREADS", "TMPDIR", "HF_HOME"}
    assert made["torchrun"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("text", "numbers"), [("8", (8,)), ("8,2,2", (2, 8))])
def test_ranks(text: str, numbers: tuple[int, ...]) -> None:
    assert positive_numbers("--ranks", text, "2,8") == numbers


@pytest.mark.parametrize(
    "argv", [["--ranks", "0"], ["--ranks", "two"], ["--contenders", "mpirun"], ["--end", ""], ["--repeat", "0"]]
)
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


@pytest.mark.extended
def test_a_small_real_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--ranks", "2", "--repeat", "1", "--contenders", "torchrun", "--end", "allreduce", "--json"]
    done = phalanx("bench", "launch", *words, "--out", str(out), timeout=150)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data == json.loads((out / "launch.json").read_text())
    (sample,) = data["samples"]
    assert (sample["contender"], sample["end"], sample["ranks"], sample["failure"]) == ("torchrun", "allreduce", 2, "")
    (one_import,) = data["import_torch"]
    assert 0 < one_import["seconds"] < one_import["total"]
    assert 0 < sample["seconds"] < sample["total"] < done.seconds
    assert data["cells"][0]["median"] == sample["seconds"]
    assert data["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert {target["met"] for target in data["targets"]} == {None}
    assert "| torchrun | all_reduce |" in (out / "launch.md").read_text()
    assert (out / "launch.png").read_bytes().startswith(b"\x89PNG")
    assert len(done.err.splitlines()) == 3  # the warm-up, one import, one launch
