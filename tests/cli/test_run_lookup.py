"""Which run a word on the command line means, and the id of a run whose name is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.cli import run_lookup
from phalanx.cli.options import values
from phalanx.errors import UsageError
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord


def _record(id_: str, name: str = "", *, started: float = 0.0, ended: float | None = 1.0) -> RunRecord:
    return RunRecord(id_, os.getpid(), 1, ["t.py"], "/", f"/runs/{id_}", 1, started, ended, 0, name=name or id_)


RUNS = [
    _record("exp"),
    _record("exp.2", "exp"),
    _record("exp.3", "exp"),
    _record("train-1116-090000-aaaa"),
    _record("train-1116-100000-bbbb"),
    _record("v1.2"),
]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("exp", ["exp.3"]),  # the newest run of that name
        ("exp.2", ["exp.2"]),
        ("exp.1", ["exp"]),
        ("ex", ["exp.3"]),  # a prefix of one name
        ("train-1116-10", ["train-1116-100000-bbbb"]),
        ("v1.2", ["v1.2"]),  # a name that looks like that of a second run
        ("v1", ["v1.2"]),
        ("train", ["train-1116-090000-aaaa", "train-1116-100000-bbbb"]),
        ("nobody", []),
    ],
)
def test_a_word_selects_runs(word: str, meant: list[str]) -> None:
    assert [run.id for run in run_lookup.matching(word, RUNS)] == meant


def test_words_filter_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lookup, "_all", lambda: RUNS)
    assert [run.id for run in run_lookup.named(["exp"])] == ["exp", "exp.2", "exp.3"]
    assert [run.id for run in run_lookup.named(["v", "exp.1", "train-1116-10"])] == ["exp", RUNS[4].id, "v1.2"]
    with pytest.raises(UsageError, match="no run called nobody is known here"):
        run_lookup.named(["exp", "nobody"])


def test_an_ambiguous_word_lists_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lookup, "_all", lambda: RUNS)
    with pytest.raises(UsageError) as raised:
        run_lookup.find("train", verb="logs")
    assert raised.value.what == "2 runs start with train"
    assert [line.split()[0] for line in raised.value.details] == ["train-1116-100000-bbbb", "train-1116-090000-aaaa"]
    assert raised.value.fix == "phalanx logs train-1116-100000-bbbb"
    with pytest.raises(UsageError, match="no run called nobody is known here"):
        run_lookup.find("nobody", verb="logs")


def test_only_one_of_two_running_runs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lookup, "_all", lambda: [_record("exp", ended=None), _record("exp.2", "exp", ended=None)])
    monkeypatch.setattr(RunRecord, "alive", property(lambda self: self.ended is None))
    with pytest.raises(UsageError) as raised:
        run_lookup.find_running("exp", verb="stop")
    assert [line.split()[0] for line in raised.value.details] == ["exp.2", "exp.1"]
    assert run_lookup.find_running("exp.1", verb="stop").id == "exp"


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    base, logs = str(tmp_path / "home"), str(tmp_path / "logs")
    made = [run_folder.create("exp", base=base, log_dir=log_dir) for log_dir in (None, None, logs, None, logs)]
    for folder in made:
        folder.close()
    assert [folder.name for folder in made] == ["exp", "exp.2", "exp.3", "exp.4", "exp.5"]
    assert {folder.given for folder in made} == {"exp"}
    assert sorted(os.listdir(logs)) == ["exp.3", "exp.5"]
    assert os.readlink(f"{base}/runs/exp.5") == f"{logs}/exp.5"
    assert os.stat(made[0].path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", "-x", ".x", "a b", "a/b", "x" * 65, "node_1", "a\x1b[0m"])
def test_a_name_must_be_safe_in_paths_and_terminals(name: str) -> None:
    with pytest.raises(ValueError, match=r"empty|starts|allowed|characters|reserved"):
        values.run_name(name)
    assert values.run_name("resnet-lr0.1_v2") == "resnet-lr0.1_v2"
