"""The functions that docs/concepts/architecture.md lists as walks through the code are called in that order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.places import script
from tests.kit.cli import python

PAGE = Path(__file__).parents[3] / "docs/concepts/architecture.md"
STEP = re.compile(r"^\d\. (?:\*\*\w+\*\*: )?(`[\w/.]+`(?: → `[\w/.]+`)*): ", re.M)
NOT_TRACED = ("forkserver/server.", "forkserver/child/", "forkserver/probe/")  # before the first line of the script
BEGINNINGS = {
    "the command line to a worker's first line": "cli/main.main",
    "`kill -9` of a rank to the next committed step": "kill",
    "a stalled rank to the printed verdict": "stall",
}


def walks() -> dict[str, list[str]]:
    """Return the functions of each walk in order."""
    text = PAGE.read_text().partition("## Three walks through the code\n")[2].partition("\n## ")[0]
    found = {}
    for part in text.split("\n\nFrom ")[1:]:
        title, _, steps = part.partition(":\n")
        names = [name for step in STEP.findall(steps) for name in re.findall(r"`([^`]+)`", step)]
        found[title] = [name for name in names if not name.startswith(NOT_TRACED)]
    return found


@pytest.mark.imported
def test_the_walks_are_those_of_a_real_run(tmp_path: Path) -> None:
    found = walks()
    assert found.keys() == BEGINNINGS.keys()
    assert all(len(names) >= 10 for names in found.values())
    traces = tmp_path / "traces"
    traces.mkdir()
    env = {"TRACES": str(traces), "TRACED": " ".join({name for names in found.values() for name in names})}
    command = ("run", "-g", "2", "--max-restarts", "2", "--stall-timeout", "2s", script("traced.py"))
    result = python(script("traced.py"), *command, env=env, cwd=str(tmp_path), timeout=120)
    assert result.code == 0, result.err
    lines = [line.split() for file in traces.iterdir() for line in file.read_text().splitlines()]
    calls = sorted((float(time), name) for time, name in lines)
    for title, names in found.items():
        now = next(time for time, name in calls if name == BEGINNINGS[title])
        for name in names:
            later = [time for time, called in calls if called == name and time >= now]
            assert later, f"{title}: {name} is not called after what precedes it"
            now = later[0]
