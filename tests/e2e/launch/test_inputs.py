"""Odd arguments, names, encodings and scripts: each way of starting a worker does with them what plain Python does."""

from __future__ import annotations

import os
import pstats
import py_compile
import shutil
import sysconfig
import zipapp
from pathlib import Path

import pytest

from tests.kit.cli import PHALANX, phalanx, python, run

pytestmark = [pytest.mark.warmed, pytest.mark.xdist_group("inputs")]

WAYS = {"cold": ["--no-warm"], "fresh": ["--fresh"], "warm": []}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)

# `python -m phalanx` has the current folder first in sys.path.
COMMAND = os.path.join(sysconfig.get_path("scripts"), "phalanx")

REPORT = """
import os, sys
main = sys.modules["__main__"]
print(ascii(sys.argv), ascii(sys.path[0]), ascii(os.getcwd()), ascii(os.environb.get(b"ODD")))
print(ascii(getattr(main, "__file__", None)), main.__cached__, sys.stdout.encoding)
print(getattr(main.__loader__, "__name__", type(main.__loader__).__name__), main.__spec__ and main.__spec__.name)
"""


def name(text: bytes) -> str:
    return os.fsdecode(text)


def report(folder: Path) -> str:
    """Create scripts of all kinds that print the same report; return their folder."""
    (folder / "report.py").write_text(REPORT)
    (folder / "app").mkdir()
    shutil.copy(folder / "report.py", folder / "app/__main__.py")
    zipapp.create_archive(folder / "app", folder / "app.pyz")
    (folder / "link").symlink_to("app.pyz")
    py_compile.compile(str(folder / "report.py"), str(folder / "report.pyc"), dfile="report.py")
    shutil.copy(folder / "report.pyc", folder / "compiled")
    (folder / name(b"d\xff")).mkdir()
    shutil.copy(folder / "report.py", folder / name(b"d\xff/s\xfe.py"))
    return str(folder)


def same(way: str, *words: str, cwd: str, env: dict[str, str] | None = None, text: str | None = None) -> None:
    expected = python(*words, cwd=cwd, env=env, input=text)
    found = phalanx("run", "--cpu", "-g", "1", *WAYS[way], *words, cwd=cwd, env=env, input=text)
    assert expected.raw_out
    assert (found.raw_out, found.code) == (expected.raw_out, expected.code), found.err


@EVERY_WAY
def test_bytes_that_are_not_utf8(way: str, tmp_path: Path) -> None:
    env = {"ODD": name(b"\xff\nx"), name(b"O\xff"): "1"}
    same(way, name(b"d\xff/s\xfe.py"), name(b"\xfd"), "", "a\nb", cwd=report(tmp_path), env=env)
    same(way, name(b"s\xfe.py"), cwd=str(tmp_path / name(b"d\xff")))


def test_every_command_can_show_such_a_run(tmp_path: Path) -> None:
    (tmp_path / name(b"bad\xff.py")).write_text("raise ValueError('caf\\u00e9 \\udcff \\ud800')")
    ended = phalanx("run", "--cpu", "-g", "1", name(b"bad\xff.py"), name(b"\xfe"), cwd=str(tmp_path))
    assert ended.code == 1
    assert "rank 0 failed: ValueError: café" in ended.err
    for env in ({"PYTHONIOENCODING": "utf-8"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
        results = {
            verb: phalanx(verb, *more, env=env, cwd=str(tmp_path))
            for verb, *more in (("ps", "--all"), ("why",), ("report", "-f", "-o", "r.html"), ("--help",))
        }
        assert [one.code for one in results.values()] == [0, 1, 0, 0], [one.err for one in results.values()]
        assert "ValueError: caf" in results["ps"].out
        assert "ValueError: caf" in results["why"].out
        missing = phalanx("plan", name(b"none\xff.py"), env=env, cwd=str(tmp_path))
        assert missing.raw_err.startswith(b"phalanx: no such script: none\xff.py\n")


@EVERY_WAY
@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=["ascii", "C"])
def test_other_encodings(way: str, env: dict[str, str], tmp_path: Path) -> None:
    same(way, "report.py", "café", cwd=report(tmp_path), env=env)


@pytest.mark.smoke
@pytest.mark.parametrize("script", ["app", "app.pyz", "link", "report.pyc", "compiled"])
def test_what_python_can_run_runs_with_a_warm_fork_server(script: str, tmp_path: Path) -> None:
    same("warm", script, "x", cwd=report(tmp_path))


@EVERY_WAY
def test_a_script_from_standard_input(way: str, tmp_path: Path) -> None:
    text = f"{REPORT}\nprint(sys.stdin.read())\n{'#' * 100_000}\nprint('end')\n"  # more than a pipe holds
    same(way, "-", "x", cwd=str(tmp_path), text=text)
    each = phalanx("run", "--cpu", "-g", "2", *WAYS[way], "-", cwd=str(tmp_path), input=text)
    assert each.out.count("['-']") == 2, each.err
    assert each.out.count("end") == 2


@pytest.mark.smoke
def test_standard_input_cannot_go_to_hosts(tmp_path: Path) -> None:
    result = phalanx("run", "--hosts", "nowhere.invalid,other.invalid", "-", cwd=str(tmp_path), input="print()")
    assert result.code == 2
    assert "--hosts cannot run a script from standard input" in result.err


@pytest.mark.smoke
def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("print('hello')")
    env = {"PHALANX_HOME": None, "XDG_STATE_HOME": None, "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    result = phalanx("run", "--cpu", "-g", "1", "--fresh", "s.py", cwd=str(tmp_path), env=env)
    assert (result.code, result.out) == (0, "hello\n")
    kept = tmp_path / f"phalanx-{os.getuid()}"
    assert result.err.count("the home folder cannot be used: runs are kept in") == 1
    assert f"output in {kept}/runs/" in result.err
    assert str(kept) in phalanx("ps", "--all", cwd=str(tmp_path), env=env).out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "env", "named"),
    [
        (["run", "--cpu", "s.py"], {"PHALANX_HOME": "/dev/null/x"}, "/dev/null/x"),
        (["run", "--cpu", "--log-dir", "/dev/null/y", "s.py"], {}, "/dev/null/y"),
        (["warm"], {"PHALANX_HOME": "/dev/null/x"}, "/dev/null/x"),
        (["ps", "--all"], {"PHALANX_HOME": "/dev/null/x"}, ""),
    ],
    ids=["home", "log dir", "warm", "ps"],
)
def test_a_given_folder_that_cannot_be_written(
    words: list[str], env: dict[str, str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text("")
    result = phalanx(*words, cwd=str(tmp_path), env=env)
    assert result.code == (1 if named else 0)
    assert named in result.err
    assert "Traceback" not in result.err
    assert ("fix: " in result.err) == bool(named)


@pytest.mark.parametrize(
    ("way", "module"), [("cold", "phalanx.py"), ("fresh", "phalanx/__init__.py"), ("warm", "phalanx/__init__.py")]
)
def test_a_module_of_the_users_that_is_called_phalanx(way: str, module: str, tmp_path: Path) -> None:
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("import os\npid = os.getpid()")
    (tmp_path / "s.py").write_text(
        "import os, torch\nimport phalanx\nprint(phalanx.__file__, phalanx.pid == os.getpid(), torch.ones(1))\n"
    )
    found = run((COMMAND, "run", "--cpu", "-g", "1", *WAYS[way], "s.py"), cwd=str(tmp_path))
    assert (found.out, found.code) == (f"{tmp_path / module} True tensor([1.])\n", 0), found.err


@EVERY_WAY
@pytest.mark.parametrize("module", ["resource", "json", "queue"])  # needed by the probe, by both, by torch
def test_a_module_of_the_users_that_is_called_like_one_of_pythons(way: str, module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("mine = 1")
    (tmp_path / "s.py").write_text(f"import {module}\nprint({module}.mine, {module}.__file__)\nraise ValueError('end')")
    expected = python("s.py", cwd=str(tmp_path))
    found = run((COMMAND, "run", "--cpu", "-g", "1", *WAYS[way], "s.py"), cwd=str(tmp_path))
    assert (found.out, found.code) == (expected.out, 1), found.err
    assert expected.err in found.err
    assert "rank 0 failed: ValueError: end" in found.err


def test_coverage_comes_before_torch(tmp_path: Path) -> None:
    (tmp_path / "coverage.py").write_text(
        "import runpy, sys\nprint('torch' in sys.modules)\nrunpy.run_path(sys.argv[1])"
    )
    (tmp_path / "s.py").write_text("print('hello')")
    found = phalanx("run", "--cpu", "-g", "1", "-m", "coverage", "s.py", cwd=str(tmp_path))
    assert found.out == "False\nhello\n", found.err


@EVERY_WAY
@pytest.mark.parametrize("words", [("cProfile", "-o", "out", "s.py"), ("trace", "--count", "-C", "out", "s.py")])
def test_modules_that_run_a_script_write_the_same_files(way: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def f(x):\n    return x + 1\n\nprint(f(1))\n")
    python("-m", *words, cwd=str(tmp_path))
    expected = written(tmp_path / "out")
    found = phalanx("run", "--cpu", "-g", "1", *WAYS[way], "-m", *words, cwd=str(tmp_path))
    assert (found.out, found.code) == ("2\n", 0), found.err
    assert written(tmp_path / "out") == expected


def written(out: Path) -> object:
    """And removed: the counts of lines, or which functions were called how often."""
    if out.is_dir():
        lines = {file.name: file.read_text() for file in out.iterdir()}
        shutil.rmtree(out)
        return lines
    calls = {function: count for function, (count, *_) in pstats.Stats(str(out)).stats.items()}  # type: ignore[attr-defined]
    out.unlink()
    return calls


@EVERY_WAY
def test_a_standard_input_that_is_closed(way: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os\nprint(os.readlink('/proc/self/fd/0'))")
    words = (*PHALANX, "run", "--cpu", "-g", "1", *WAYS[way], "s.py")
    found = run(("sh", "-c", 'exec "$@" <&-', "sh", *words), cwd=str(tmp_path))
    assert (found.out, found.code) == ("/dev/null\n", 0), found.err


def test_escapes_of_a_rank_are_shown_and_not_sent(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('\\x1b]0;mine\\x07\\x1b[2J\\x9b1A')")
    (tmp_path / "\x1b[2J.py").write_text("import torch\nopt = torch.optim.SGD([]); opt.step(")
    ended = phalanx("run", "--cpu", "-g", "2", "bad.py", cwd=str(tmp_path))
    assert r"failed: ValueError: \x1b]0;mine\x07\x1b[2J\x9b1A" in ended.err
    results = [phalanx(*words, cwd=str(tmp_path)) for words in (("why",), ("ps", "--all"))]
    results += [phalanx("plan", "--env", "ODD=\x1b]0;mine\x07", "bad.py", cwd=str(tmp_path))]
    results += [phalanx("lint", "\x1b[2J.py", cwd=str(tmp_path)), phalanx("run", "\x1b[3J.py", cwd=str(tmp_path))]
    for one in (*results, ended):
        assert b"\x1b" not in one.raw_out + one.raw_err
        assert rb"\x1b" in one.raw_out + one.raw_err or b"ValueError: ]0;mine [2J" in one.raw_out  # ps: one line
