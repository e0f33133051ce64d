"""Which files a run keeps, and when they count as changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.launcher.command import Command
from phalanx.launcher.forking.source_snapshot import SourceSnapshot, imported, local_roots


@pytest.mark.parametrize(
    ("text", "package", "found"),
    [
        ("import a", [], ["a"]),
        ("import a.b as c, d", [], ["a.b", "d"]),
        ("    from a import b, c as d  # comment", [], ["a.b", "a.c"]),
        ("from a.b import (\n    c,\n    d\n)", [], ["a.b.c", "a.b.d"]),
        ("from . import x", ["p", "q"], ["p.q.x"]),
        ("from .x import y", ["p", "q"], ["p.q.x.y"]),
        ("from ..x import *", ["p", "q"], ["p.x"]),
        ("important = 1\nfromage = 'from a import b'", [], []),
    ],
)
def test_imports(text: str, package: list[str], found: list[str]) -> None:
    assert [".".join(parts) for parts in imported(text.encode(), package)] == found


@pytest.mark.parametrize(
    ("path0", "pythonpath", "roots"),
    [
        ("/x/tools", "", ["/x/tools"]),
        ("/x/tools", ".:src", ["/x/tools", "/x", "/x/src"]),
        ("/y/repo/tools", "/y/repo:/opt/torch", ["/y/repo/tools", "/y/repo"]),
        ("/y", "/", ["/y"]),
    ],
)
def test_folders_of_local_modules(path0: str, pythonpath: str, roots: list[str]) -> None:
    assert local_roots(path0, pythonpath, "/x") == roots


def project(folder: Path) -> SourceSnapshot:
    for name, text in {
        "train.py": "import torch, helper\nfrom pkg.deep import depth\nimport os",
        "helper.py": "VERSION = 1",
        "unused.py": "",
        "pkg/__init__.py": "",
        "pkg/deep.py": "from .leaf import LEAF",
        "pkg/leaf.py": "from . import deep",  # a circle
        "pkg/other.py": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return SourceSnapshot(Command("script", "train.py", (), "python"), {}, str(folder))


def test_the_script_and_the_local_modules_that_it_imports_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = [os.path.relpath(path, tmp_path) for path in project(tmp_path).paths]
    assert kept == ["helper.py", "pkg/__init__.py", "pkg/deep.py", "pkg/leaf.py", "train.py"]
    module = SourceSnapshot(Command("module", "pkg.deep", (), "python"), {}, str(tmp_path))
    assert [os.path.relpath(path, tmp_path) for path in module.paths] == [
        "pkg/__init__.py",
        "pkg/deep.py",
        "pkg/leaf.py",
    ]


def test_what_has_changed_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = project(tmp_path)
    os.utime(tmp_path / "helper.py", (1, 1))  # touched, but unchanged
    assert sources.changed() == {}
    (tmp_path / "pkg/leaf.py").unlink()
    (tmp_path / "train.py").write_text("new")
    changed = sources.changed()
    assert changed.keys() == {str(tmp_path / "train.py"), str(tmp_path / "pkg/leaf.py")}
    assert changed[str(tmp_path / "pkg/leaf.py")] == b"from . import deep"
    messages: list[str] = []
    sources.tell(changed, messages.append)
    sources.tell(changed, messages.append)
    (line,) = messages
    assert line.startswith(
        "train.py, pkg/leaf.py have changed on the disk since the run began; ranks that start now run"
    )
