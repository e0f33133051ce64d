"""The table of exit codes in docs/reference/exit-codes.md matches the code."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import errors
from phalanx.cli.main import VERBS
from tests.kit.cli import phalanx

RUNS = ("run", "chaos", "demo")  # these return the exit code of a run


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """The rows of the table: code, command."""
    text = (request.config.rootpath / "docs" / "reference" / "exit-codes.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    return [(code.strip(), command.strip()) for code, command in rows[1:]]


def _returned(path: Path) -> Iterator[int]:
    """Yield the numbers that functions with an exit code return."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and ast.unparse(function.returns or ast.Constant("")) == "int":
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield from _constants(node.value)


def _constants(value: ast.expr) -> Iterator[int]:
    if isinstance(value, ast.IfExp):
        yield from _constants(value.body)
        yield from _constants(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, int):
        yield value.value


@pytest.mark.checkout
def test_every_code_in_the_code_is_in_the_table(table: list[tuple[str, str]], request: pytest.FixtureRequest) -> None:
    cli = request.config.rootpath / "src" / "phalanx" / "cli"
    anywhere = {int(code) for code, command in table if command == "any command"}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    kinds.remove(errors.NonFiniteError)  # raised in a worker: only a run ends with it
    assert {kind.exit_code for kind in kinds} | set(_returned(cli / "main.py")) == anywhere
    for verb in VERBS:
        own = {int(code) for code, command in table if code.isdigit() and f"`{verb}`" in command}
        (path,) = (cli / "commands").glob(f"*/{verb}.py")
        found = set(_returned(path))
        assert found - {0, 130} == own - {75} or verb in RUNS, verb
    assert ("75", "`run`") in table
    assert (str(errors.NonFiniteError.exit_code), "`run`") in table
    assert os.EX_TEMPFAIL == 75
    assert ("N", "`run`, `chaos`, `demo`") in table


@pytest.mark.parametrize(
    ("script", "code"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_run_has_the_code_of_its_script(tmp_path: Path, script: str, code: int) -> None:
    (tmp_path / "script.py").write_text(script)
    assert phalanx("run", "--fresh", str(tmp_path / "script.py")).code == code


def test_wrong_usage_is_2() -> None:
    for words in (("run", "nowhere.py"), ("logs", "nobody"), ("nonsense",), ("run", "--name", "a b", "x.py")):
        assert phalanx(*words).code == 2
