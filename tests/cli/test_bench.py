"""`phalanx bench`: where it finds the benchmarks, and its message without a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.commands.learn import bench
from phalanx.errors import UsageError
from tests.kit.cli import phalanx


def checkout(folder: Path, project: str) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "main.py").touch()
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    return folder


@pytest.mark.checkout
def test_the_checkout_of_an_editable_install_is_found_from_anywhere(tmp_path: Path) -> None:
    done = phalanx("bench", "--help", cwd=str(tmp_path))
    assert done.code == 0, done.err
    assert "usage: phalanx bench NAME" in done.out
    assert "  recover " in done.out


def test_the_first_checkout_counts(tmp_path: Path) -> None:
    first, second = checkout(tmp_path / "a", "phalanx"), checkout(tmp_path / "b", "phalanx")
    assert bench.find_checkout((first, second)) == first
    assert bench.find_checkout((tmp_path, second)) == second


def test_benchmarks_of_another_project_are_not_taken_for_ours(tmp_path: Path) -> None:
    other = checkout(tmp_path / "a", "other")
    broken = checkout(tmp_path / "b", 'phalanx"\n[')
    (tmp_path / "c" / "benchmarks").mkdir(parents=True)
    with pytest.raises(UsageError):
        bench.find_checkout((other, broken, tmp_path / "c"))


def test_without_a_checkout_it_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "PACKAGE", tmp_path / "lib" / "site-packages" / "phalanx")
    with pytest.raises(UsageError, match="needs a checkout") as raised:
        bench.main(["launch"])
    assert str(tmp_path) in str(raised.value)
    assert "git clone" in raised.value.fix
    assert "pip install -e '.[bench]'" in raised.value.fix


def test_an_unknown_name() -> None:
    done = phalanx("bench", "luck")
    assert done.code == 2
    assert "there is no benchmark luck" in done.err
