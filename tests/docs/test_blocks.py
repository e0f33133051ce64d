"""The documentation is correct: commands parse, Python calls exist, diffs and paths match the files."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import phalanx
from benchmarks.main import BENCHMARKS
from phalanx.cli import main as cli
from phalanx.cli.commands.run.chaos import _parse as parse_chaos
from phalanx.cli.main import HIDDEN, VERBS
from phalanx.cli.options import HelpRequested, parse_plan, parse_run
from phalanx.errors import PhalanxError
from phalanx.worker.process_group.group import WorkerProcessGroup
from tests.docs import blocks
from tests.docs.blocks import EXAMPLES, ROOT, Block, of_language

PAGES = blocks.pages()
PLACEHOLDERS = {"RANK": "2", "PID": "4711", "TIME": "10s", "N": "2", "MIN:MAX": "1:4", "NAME": "launch"}


class Parsed(Exception):
    """Raised after parsing, instead of running the command."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """A function that parses the words after `phalanx` with the real parser, and fails if they are refused."""
    (tmp_path / "hosts").write_text("gpu-a slots=8\n")
    monkeypatch.chdir(tmp_path)
    original = argparse.ArgumentParser.parse_args

    def parse_args(*args: object, **options: object) -> None:
        original(*args, **options)  # type: ignore[arg-type]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)

    def check(words: list[str]) -> None:
        verb, *rest = words
        rest = [re.sub(r"\$\w+", "1", PLACEHOLDERS.get(word, word)) for word in rest if word != "…"]
        if verb in ("run", "plan", "chaos"):
            {"run": parse_run, "plan": parse_plan, "chaos": parse_chaos}[verb](rest, {})
            return
        assert verb in VERBS, f"phalanx {verb}"
        if verb == "bench":
            assert rest[0] in BENCHMARKS, f"phalanx bench {rest[0]}"
            return
        with pytest.raises((Parsed, HelpRequested)):
            cli.command(verb).main(rest)

    return check


def refused(parse: object, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message of the parser. Empty: the command is accepted."""
    if not words or words[0] in ("help", "--version", "--help", "…"):
        return ""
    try:
        parse(words)  # type: ignore[operator]
    except PhalanxError as error:
        return str(error)
    except SystemExit:
        return capsys.readouterr().err
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_blocks_parse(page: str, parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for block in (block for block in blocks.blocks(page) if block.language == "bash"):
        subprocess.run(["bash", "-n"], input=block.text.replace("…", ""), text=True, check=True)
        for line in blocks.lines(block):
            for words in blocks.commands(line):
                if why := refused(parse, words, capsys):
                    wrong[f"{block}: {line}"] = why
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_parse(page: str, parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The text may name a command without its script (`phalanx run --cpu`), or only its verb."""
    wrong = {}
    for text in blocks.inline_commands(page):
        for words in blocks.commands(text):
            if words[1:] and refused(parse, words, capsys) and (why := refused(parse, [*words, "train.py"], capsys)):
                wrong[text] = why
            assert words[0] in (*VERBS, *HIDDEN, "help", "--version", "…", "VERB"), text
    assert wrong == {}


@pytest.mark.parametrize("block", of_language("bash"), ids=str)
def test_targets_of_make_exist(block: Block) -> None:
    for line in blocks.lines(block):
        if line.startswith("make "):
            subprocess.run(["make", "-n", *blocks.words(line)[1:]], cwd=ROOT, check=True, capture_output=True)
        if line.startswith(".ci/"):
            assert (ROOT / blocks.words(line)[0]).exists(), line


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_python_compiles_and_its_calls_exist(block: Block) -> None:
    """Checks functions of phalanx and methods of `run` and `run.group`, with their keyword arguments."""
    tree = ast.parse(block.text.replace("…", "..."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := ast.unparse(node.value)) in OBJECTS:
            assert node.attr in OBJECTS[owner], f"{block}: {ast.unparse(node)}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = _function(call.func)
        if function is not None:
            keywords = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(function).bind_partial(**keywords)  # type: ignore[arg-type]


OBJECTS = {
    "phalanx": set(phalanx.__all__),
    "run": set(dir(phalanx.Run)),
    "run.group": {*dir(WorkerProcessGroup), "store", "folder"},
}
MODULES = {path.stem for path in (ROOT / "src" / "phalanx").iterdir()}
NOT_CALLS = {"run.json", "run.barrier"}  # a file, and a name of which docs/concepts/training.md shows the error


def _function(node: ast.expr) -> object:
    if not isinstance(node, ast.Attribute):
        return None
    owner = {"phalanx": phalanx, "run": phalanx.Run, "run.group": WorkerProcessGroup}.get(ast.unparse(node.value))
    found = getattr(owner, node.attr, None)
    return found if inspect.isroutine(found) else None


@pytest.mark.parametrize("block", of_language("diff"), ids=str)
def test_diffs_are_those_of_the_files(block: Block) -> None:
    names = re.match(r"--- (\S+)\n\+\+\+ (\S+)\n", block.text)
    assert names is not None, "a diff begins with the names of two files"
    shown = [blocks.diff(before, after) for before in EXAMPLES.rglob(names[1]) for after in [before.parent / names[2]]]
    assert block.text in shown


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_yaml_parses(block: Block, parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(yaml.safe_load_all(block.text))
    for command in re.findall(r"command: \[phalanx, (.+)\]", block.text):
        assert refused(parse, re.split(r", *", command), capsys) == ""


@pytest.mark.parametrize("block", of_language("dockerfile"), ids=str)
def test_commands_of_images_parse(block: Block, parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^CMD (\[.*\])$", block.text, re.M)
    assert refused(parse, json.loads(command)[1:], capsys) == ""


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_output_or_in_a_language_that_tests_check(page: str) -> None:
    """A block without a language shows output, folders or a diagram."""
    known = ("", "bash", "python", "diff", "yaml", "dockerfile")
    assert [str(block) for block in blocks.blocks(page) if block.language not in known] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    found = re.findall(r"github\.com/phalanx-train/phalanx/(?:blob|tree)/main/([\w./-]+)", text)
    found += re.findall(r"(?<![\w/.-])((?:src|tests|docs|examples|benchmarks|tools)/[\w./-]+\.\w+)\b", text)
    for path in found:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_calls_that_the_text_names_exist(page: str) -> None:
    for owner, name in re.findall(r"`(run\.group|run|phalanx)\.([a-z]\w+)\b", blocks.prose(page)):
        known = OBJECTS[owner] | (MODULES if owner == "phalanx" else set())
        assert name in known or f"{owner}.{name}" in NOT_CALLS, f"{owner}.{name}"


def test_every_script_of_the_tutorials_is_shown() -> None:
    shown = "".join((ROOT / page).read_text() for page in PAGES if page.startswith("docs/"))
    for path in (EXAMPLES / "tutorial").iterdir():
        if path.suffix in (".py", ".sbatch"):
            assert f"--8<--\nexamples/tutorial/{path.name}\n" in shown or f"+++ {path.name}" in shown, path.name


def test_needs_of_a_line() -> None:
    assert blocks.needs("phalanx run -g 4 train.py  # as srun does") == ""
    assert blocks.needs("phalanx chaos -g 2 --kill-every 2s train.py  # kill ranks") == ""
    assert blocks.needs("sleep 1; kill -9 PID") == "a live run"
    assert blocks.needs("srun -N 2 phalanx run train.py") == "a cluster"
    assert blocks.needs("phalanx run -n 2 -i 0 --master a train.py") == "several hosts"


def test_commands_are_found() -> None:
    assert blocks.commands("A=$(cat key) phalanx run -g 2 train.py > log 2>&1  # phalanx why") == [
        ["run", "-g", "2", "train.py"]
    ]
    assert blocks.commands("phalanx warm; phalanx ps --all | head") == [["warm"], ["ps", "--all"]]
    assert blocks.commands("srun -N 2 phalanx doctor") == [["doctor"]]


def test_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'A\n<!-- exits: 1 -->\n```bash\nfalse\n```\n\n  ```python title="a.py"\n  x = 1\n  ```\n'
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    first, second = blocks.blocks.__wrapped__("page.md")
    assert (first.language, first.text, first.exits, first.line) == ("bash", "false", 1, 3)
    assert (second.language, second.text, second.title, second.exits) == ("python", "x = 1", "a.py", 0)
