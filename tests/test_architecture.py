"""The code matches docs/concepts/architecture.md and CONTRIBUTING.md: functions, files, packages, layers."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHOD = re.compile(r"\b([A-Z][A-Za-z]+)\.(_?[a-z_]+)\b")
FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)+)(?:\.py)?[.`]")


def methods() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src/phalanx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(
                    each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                )
    return found


def test_what_the_walks_name_exists() -> None:
    text, known = (ROOT / "docs/concepts/architecture.md").read_text(), methods()
    named = METHOD.findall(text)
    assert len(named) > 10
    assert [f"{owner}.{name}" for owner, name in named if name not in known.get(owner, ())] == []
    places = [place for place in FILE.findall(text) if place.split("/")[0] not in ("docs", "tests")]
    assert len(places) > 10
    there = ROOT / "src/phalanx"
    assert [place for place in places if not (there / place).is_dir() and not (there / f"{place}.py").is_file()] == []


def test_the_layers_of_the_page_are_those_that_are_enforced() -> None:
    page = (ROOT / "docs/concepts/architecture.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for name in ("imports point down", "packages of the launcher are layers"):
        (layers,) = [contract["layers"] for contract in contracts if contract["name"] == name]
        shown = "\n".join(layers).replace("phalanx.", "")
        assert f"```\n{shown}\n```" in page


def test_phalanx_starts_itself_without_the_current_folder() -> None:
    """Without `-P`, `python -m` would import a phalanx.py or json.py from the current folder."""
    calls = 0
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple):
                words = [word.value if isinstance(word, ast.Constant) else None for word in node.elts]
                for place in range(len(words) - 1):
                    if words[place] == "-m" and str(words[place + 1]).startswith("phalanx"):
                        calls += 1
                        assert words[place - 1] == "-P", f"{path}:{node.lineno}"
    assert calls > 10


def test_packages_of_the_contributing_page_exist() -> None:
    named = re.findall(r"^\| `([\w/]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(named) > 10
    there = ROOT / "src/phalanx"
    assert [name for name in named if not (there / name).is_dir() and not (ROOT / name).is_dir()] == []


def test_no_public_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in (ROOT / "src/phalanx").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
