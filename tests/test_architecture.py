"""The code matches docs/concepts/architecture.md and CONTRIBUTING.md: functions, files, packages, layers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pictures import diagrams

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/concepts/architecture.md"
PACKAGE = ROOT / "src/phalanx"
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+)(?:\.py)?(?:/|((?:\.[A-Za-z_]+)*))`")  # launcher/api.py, launcher/api.launch
BROAD = ("Exception", "BaseException")
LOGS = {"debug", "info", "warning", "error", "exception", "log", "swallowed", "print_exc"}
SOURCES = (".py", ".c", ".h", ".js", ".css")
MOST_FILES = 14  # per folder: about a dozen
MOST_LINES = 400
LARGE_FOLDERS = {
    "examples": "scripts that do not depend on each other",
    "src/phalanx/collectives/native": "one C library: each header counts, too",
}
LONG_FILES = {
    "src/phalanx/cli/options/table.py": "a table with one entry per option; there is nothing else in it",
    "src/phalanx/collectives/native/binding.c": "one short function per call; in two files, helpers would be exported",
    "src/phalanx/control/messages.py": "the messages of one protocol; there is nothing else in it",
    "src/phalanx/watch/page/assets/style.css": "the one stylesheet of the page, which a report contains, too",
}
NAME = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)((?:\.[a-z_]+)*)`")  # NodeAgent, NodeAgent.perform


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Return the names of functions, classes and methods: "NodeAgent", "NodeAgent.run"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, f"{prefix}{node.name}.")


def test_what_the_page_names_exists() -> None:
    """Files, folders, classes, functions and methods."""
    text = PAGE.read_text()
    defined = {
        str(path.relative_to(PACKAGE).with_suffix("")): set(definitions(ast.parse(path.read_text())))
        for path in PACKAGE.rglob("*.py")
    }
    files = [found for found in FILE.findall(text) if not found[0].startswith(("docs/", "tests/"))]
    assert len(files) > 90
    missing = [
        place + name
        for place, name in files
        if not ((PACKAGE / place).is_dir() or place in defined) or (name and name[1:] not in defined[place])
    ]
    names = NAME.findall(text)
    assert len(names) > 25
    everywhere = set().union(*defined.values())
    missing += [name + rest for name, rest in names if name + rest not in everywhere]
    assert missing == []


def test_the_types_of_the_path_are_where_the_page_says() -> None:
    rows = re.findall(r"^[a-zI ]+\?  +([A-Z]\w+) +([a-z_/]+)", PAGE.read_text(), re.M)
    assert len(rows) == 13
    for name, place in rows:
        files = [*(PACKAGE / place).rglob("*.py")] or [PACKAGE / f"{place}.py"]
        if place in {"cli/launch_context", "launcher/coordination"}:  # these make it
            assert any(re.search(rf"\b{name}\(", file.read_text()) for file in files), name
        else:
            assert any(re.search(rf"^(class )?{name}\b", file.read_text(), re.M) for file in files), name


def test_the_packages_of_the_page_are_all_there_is() -> None:
    tree = PAGE.read_text().partition("\nsrc/phalanx/\n")[2].partition("\nbenchmarks/")[0]
    shown, top = set(), ""
    for indent, name in re.findall(r"^(  |    )([a-z_]+)/ ", tree, re.M):
        top = name if indent == "  " else top
        shown.add(name if indent == "  " else f"{top}/{name}")
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    first = {str(folder) for folder in folders if len(folder.parts) == 1}
    assert {name for name in shown if "/" not in name} == first
    assert {name for name in shown if name.startswith("launcher/")} == {
        str(folder) for folder in folders if folder.parts[:1] == ("launcher",) and len(folder.parts) == 2
    }
    assert [name for name in shown if not (PACKAGE / name).is_dir()] == []


def test_the_picture_of_the_layers_shows_those_that_are_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs/pictures/packages.svg").read_text() == diagrams.packages(), "make pictures"
    assert "(../pictures/packages.svg)" in PAGE.read_text()


def level(function: str) -> tuple[int, int]:
    """Return the layer of "launcher/agent/agent.NodeAgent.run", and that within the launcher. 0 is the highest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["name"]: contract.get("layers", ()) for contract in contracts}

    def index(name: str, contract: str) -> int:
        return next(at for at, layer in enumerate(layers[contract]) if name in re.findall(r"\w+", layer))

    top, _, rest = function.partition("/")
    inside = index(re.match(r"\w+", rest)[0], "packages of the launcher are layers") if top == "launcher" else 0  # type: ignore[index]
    return index(top, "imports point down"), inside


def test_the_walks_of_the_page_go_up_only_where_it_says() -> None:
    text = PAGE.read_text().partition("## Three walks through the code\n")[2].partition("\n## ")[0]
    up = set()
    for walk in text.split("\n\nFrom ")[1:]:
        chains = [re.search(r"`\w+/[\w/.]+`(?: → `[\w/.]+`)*", step) for step in re.findall(r"^\d\. .*", walk, re.M)]
        called = [name for chain in chains if chain for name in re.findall(r"`([^`]+)`", chain[0])]
        assert len(called) > 10
        up |= {(one, other) for one, other in pairwise(called) if level(other) < level(one)}
    assert up == set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", text, re.M))


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


def test_folders_and_files_are_small() -> None:
    """A folder has about a dozen source files, a file at most 400 lines. Exceptions have a reason, and are needed."""
    paths = [path for top in ("src", "benchmarks", "tools", "examples") for path in (ROOT / top).rglob("*")]
    files = [path.relative_to(ROOT) for path in paths if path.suffix in SOURCES and path.name != "__init__.py"]
    folders = Counter(str(file.parent) for file in files)
    lines = {str(file): len((ROOT / file).read_text().splitlines()) for file in files}
    assert len(files) > 600
    assert {name: count for name, count in folders.items() if count > MOST_FILES}.keys() == LARGE_FOLDERS.keys()
    assert {name: count for name, count in lines.items() if count > MOST_LINES}.keys() == LONG_FILES.keys()


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in (ROOT / "src/phalanx").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_import_circle() -> None:
    """Neither between modules, whenever they import, nor between C files."""
    modules = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                names = [f"{source}.{each.name}" for each in node.names]
                found = {each if each in modules else source for each in names}
            else:
                continue
            imports.setdefault(name, set()).update((found & modules.keys()) - {name})
    TopologicalSorter(imports).prepare()  # raises CycleError
    native = PACKAGE / "collectives/native"
    defined, called = {}, {}
    for path in native.glob("*.c"):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)
        defined |= dict.fromkeys(re.findall(r"^(?!static)\w[\w *]*?\b(\w+)\([^;{]*\)\s*\{", text, re.M), path.name)
        called[path.name] = set(re.findall(r"\b(\w+)\(", text))
    assert len(defined) > 20
    calls = {name: {defined[each] for each in words & defined.keys()} - {name} for name, words in called.items()}
    TopologicalSorter(calls).prepare()


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a plain record: a dataclass, a msgspec struct or a named tuple."""
    texts = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any(text.startswith(("dataclass", "msgspec.Struct", "NamedTuple")) for text in texts)


def test_classes_are_small() -> None:
    """At most 25 methods, except where torch defines the interface, and 15 attributes, except for records.

    Those of base classes count: a class is not smaller if a part of it is in another file.
    """
    methods: dict[str, set[str]] = {}
    attributes: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    records = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                methods[node.name] = {each.name for each in found}
                bases[node.name] = [ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in node.bases]
                stored = {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                }
                declared = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                attributes[node.name] = stored | {each.id for each in declared if isinstance(each, ast.Name)}
                if is_record(node):
                    records.add(node.name)

    def inherited(name: str, members: dict[str, set[str]]) -> set[str]:
        return members.get(name, set()).union(*(inherited(base, members) for base in bases.get(name, ())))

    large = {name for name in methods if len(inherited(name, methods)) > 25}
    assert large == {
        *("EngineProcessGroup", "Wrapped"),  # a ProcessGroup and a Module of torch
        *("Run", "WorkerProcessGroup"),  # the public API: 20 names, and torch's collectives by name
        "MpiEngine",  # a method for each kind of call of an engine, and the thread that makes them
    }
    most = {name: len(inherited(name, attributes)) for name in attributes if name not in records}
    assert {name: count for name, count in most.items() if count > 15} == {"MpiEngine": 16}


def is_broad(kind: ast.expr | None) -> bool:
    """Return whether `except KIND`, or `suppress(KIND)`, catches every exception."""
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or (isinstance(each, ast.Name) and each.id in BROAD) for each in names)


def leaves_a_trace(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler raises, logs, or passes the exception on."""
    nodes = [node for statement in handler.body for node in ast.walk(statement)]
    called = {getattr(node.func, "attr", "") for node in nodes if isinstance(node, ast.Call)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return handler.name in used or bool(called & LOGS) or any(isinstance(node, ast.Raise) for node in nodes)


def test_no_exception_is_swallowed_without_a_trace() -> None:
    """A broad handler raises, logs or passes the exception on. Where it does none of these, a comment says why."""
    count, silent = 0, []
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
                count += 1
                if not leaves_a_trace(node) and not any("#" in line for line in lines[node.lineno - 2 : node.lineno]):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress":
                silent += [f"{path.relative_to(ROOT)}:{node.lineno}" for each in node.args if is_broad(each)]
    assert count > 50
    assert silent == []
