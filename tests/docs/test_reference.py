"""docs/reference and the README match the code."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

import pytest
import torch.distributed.run

from phalanx import errors
from phalanx.cli.main import VERBS, command
from phalanx.cli.options.table import OPTIONS
from phalanx.contract import variables
from phalanx.contract.ranks.placement import RankPlacement
from tests.kit.cli import phalanx
from tools import reference

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    """If this fails: python -m tools.reference"""
    assert (PAGES / name).read_text() == reference.PAGES[name]()


def test_every_field_of_an_event_is_described() -> None:
    title, missing = "", []
    for line in (PAGES / "events.md").read_text().splitlines():
        title = line.lstrip("# ") if line.startswith("##") else title
        if line.endswith("|  |") and title not in ("ranks", "RankInfo"):  # their docstrings say all
            missing.append((title, line))
    assert missing == []


def test_every_exception_is_in_the_reference() -> None:
    page = (PAGES / "python.md").read_text()
    names = [
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
    ]
    assert len(names) > 10
    assert [name for name in names if f"::: phalanx.errors.{name}\n" not in page + "\n"] == []


def test_every_option_of_the_help_is_in_the_reference() -> None:
    page = (PAGES / "options.md").read_text()
    for verb in ("run", "plan", "chaos"):
        named = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", phalanx(verb, "--help-all").out, re.M))
        assert len(named) > 50
        assert [name for name in sorted(named) if not re.search(rf"{name}(?![\w-])", page)] == []
    assert all(option.name in page for option in OPTIONS)
    page = (PAGES / "commands.md").read_text()
    for verb in VERBS:
        section = page.partition(f"### phalanx {verb}\n")[2].partition("\n### ")[0]
        assert section, verb
        if verb in (*reference.AS_RUN, "bench"):
            continue
        parser: argparse.ArgumentParser = command(verb).make_parser()
        named = set(re.findall(r"(?<![\w-])--[\w-]+", parser.format_help())) - {"--help"}
        assert {name for name in named if name not in section} == set(), verb


def test_every_option_of_torchrun_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "how-to" / "from-torchrun.md").read_text()
    table = guide.partition("### Options\n")[2].partition("\n### ")[0]
    rows = "".join(line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `"))
    theirs = {name for action in torch.distributed.run.get_args_parser()._actions for name in action.option_strings}
    theirs = {name for name in theirs if name.startswith("--") and "_" not in name} - {"--help"}
    ours = {option.name for option in OPTIONS if option.origin.startswith("torch")} - {"--help"}
    assert len(theirs) > 25
    assert [name for name in sorted(theirs | ours) if f"`{name}`" not in rows] == []
    idle = {
        name
        for line in table.splitlines()
        if "without effect" in line
        for name in re.findall("`(--[a-z-]+)`", line.split(" | ")[0])
    }
    assert idle == {option.name for option in OPTIONS if option.no_effect} - {"--event-log-handler"}


def test_every_variable_is_in_the_reference() -> None:
    page = (PAGES / "environment.md").read_text()
    placement = RankPlacement(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, node_count=1)
    worker = variables.WorkerVariables(placement, "default", "none", "a", "/a", "127.0.0.1", 1, 0, 0, "/a/e", "SIGTERM")
    ours = {
        name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r"\bPHALANX_[A-Z_]+", path.read_text())
    }
    assert len(ours) > 15
    for name in {*variables.worker_environment(worker, {}), *variables.INTERFACES, *ours}:
        assert f"`{name}`" in page, name


def test_every_file_of_a_run_is_in_the_reference(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('no')")
    home = tmp_path / "home"
    assert phalanx("run", "--fresh", "--name", "a", "-g", "2", str(script), env={"PHALANX_HOME": str(home)}).code == 1
    page, run = (PAGES / "run-folder.md").read_text(), home / "runs" / "a"
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        name = re.sub(r"^attempt_\d+/\d+/", "attempt_N/RANK/", str(path))
        assert f"`{name}`" in page, name
    for entry in home.iterdir():
        assert entry.name == "runs" or f"`{entry.name}" in page, entry.name


def test_figures_of_the_readme_are_in_the_benchmarks() -> None:
    """Checks the numbers with a unit or a factor in its comparison table."""
    better = (ROOT / "README.md").read_text().partition("## What is better")[2].partition("\n## ")[0]
    figures = re.findall(r"\d+(?:\.\d+)?(?: (?:s|ms|µs|%)\b|×)", better)
    assert len(figures) > 8
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    numbers = set(re.findall(r"\d+(?:\.\d+)?", measured))
    assert [figure for figure in figures if re.match(r"[\d.]+", figure)[0] not in numbers] == []  # type: ignore[index]
