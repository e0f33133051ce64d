"""The error file that a worker writes while its interpreter reports an exception."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.forkserver.child import error_file
from phalanx.launcher.output.tracebacks import read_error_file


def written(path: Path, error: BaseException) -> dict[str, Any]:
    try:
        raise error
    except BaseException:
        error_file.write(str(path), *sys.exc_info())
    return json.loads(path.read_text())  # type: ignore[no-any-return]


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Mute("a"), "Mute: <exception str() failed>"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("a\nb"), "ValueError: a\nb"),
        (ValueError("\udcff"), "ValueError: \udcff"),
    ],
    ids=["broken __str__", "no message", "two lines", "no text"],
)
def test_whatever_an_exception_says_is_read_again(tmp_path: Path, error: BaseException, text: str) -> None:
    written(tmp_path / "error.json", error)
    found = read_error_file((tmp_path / "error.json").read_text())
    assert found.exception == text
    assert found.when is not None
    assert found.frames[-1][2] == "written"


def test_a_syntax_error_is_shown_with_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("x = (1,\ny = 2\n", "/w/broken.py", "exec")
    record = written(tmp_path / "error.json", raised.value)
    assert record["frames"][-1] == ["/w/broken.py", 1, "", "x = (1,"]


@pytest.mark.parametrize(
    ("printed", "hint"),
    [
        ("NameError: no rat. Did you mean: 'rate'?\n", ". Did you mean: 'rate'?"),
        ("__main__.NameError: no rat. Did you forget to import 'rat'?", ". Did you forget to import 'rat'?"),
        # torch puts the rank before every line, once per group that the process has formed.
        ("[rank0]: [rank0]: NameError: no rat. Did you mean: 'rate'?\n", ". Did you mean: 'rate'?"),
        # Another thread, or a finalizer, printed a line in between.
        ("NameError: no ratsys:1: ResourceWarning: unclosed file\n. Did you mean: 'rate'?", ". Did you mean: 'rate'?"),
        ("NameError: no rat\n", ""),
        ("NameError: no cat. Did you mean: 'rate'?\n", ""),
        ("NameError: no rat. Did you mean: 'rate'?\n\nDuring this:\n\nNameError: no rat\n", ""),
    ],
)
def test_the_hint_is_found_where_the_message_was_printed(printed: str, hint: str) -> None:
    assert error_file.hint("NameError: no rat", printed) == hint


def test_the_hint_that_python_prints_is_part_of_the_message(tmp_path: Path) -> None:
    printed = "Traceback …\nNameError: name 'rat' is not defined. Did you mean: 'rate'?\n"
    path = tmp_path / "error.json"
    error_file.write(str(path), NameError, NameError("name 'rat' is not defined"), None, printed)
    assert read_error_file(path.read_text()).exception.endswith("is not defined. Did you mean: 'rate'?")
    # phalanx.main has written the file before the traceback was printed.
    path.unlink()
    error_file.write(str(path), NameError, NameError("name 'rat' is not defined"), None)
    before = json.loads(path.read_text())["time"]
    error_file.write(str(path), NameError, NameError("name 'rat' is not defined"), None, printed)
    found = read_error_file(path.read_text())
    assert found.exception.endswith("is not defined. Did you mean: 'rate'?")
    assert found.when == before


SCRIPT = """
import sys
from phalanx.forkserver.child import setup
setup.record_exceptions(sys.argv[1])
def give_up():
    sys.exit(*eval(sys.argv[2]))
give_up()
"""


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [("[3]", 3, "sys.exit(3)"), ("['no data']", 1, "sys.exit: no data"), ("[259]", 3, "sys.exit(259)")],
)
def test_where_sys_exit_was_called_is_written(tmp_path: Path, status: str, code: int, text: str) -> None:
    path = tmp_path / "error.json"
    done = subprocess.run([sys.executable, "-c", SCRIPT, path, status], capture_output=True, text=True, check=False)
    assert done.returncode == code
    found = read_error_file(path.read_text())
    assert (found.exception, found.kind, found.code) == (text, "SystemExit", code)
    assert [frame[2] for frame in found.stack] == ["<module>", "give_up"]


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_where_exit_and_quit_were_called_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / "error.json"
    script = SCRIPT.replace("sys.exit(*", f"{name}(*")
    done = subprocess.run([sys.executable, "-c", script, path, "[3]"], check=False)
    found = read_error_file(path.read_text())
    assert (done.returncode, found.exception) == (3, f"{name}(3)")
    assert [frame[2] for frame in found.stack] == ["<module>", "give_up"]


def test_an_exit_that_a_sitecustomize_has_replaced_stays_as_it_is(tmp_path: Path) -> None:
    replaced = "import builtins, sys\nbuiltins.exit = sys.exit\n"  # a built-in function, whose type cannot be changed
    words = [sys.executable, "-c", replaced + SCRIPT, tmp_path / "error.json", "[3]"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("status", ["[]", "[0]", "[None]"])
def test_an_exit_without_an_error_is_not_written(tmp_path: Path, status: str) -> None:
    path = tmp_path / "error.json"
    done = subprocess.run([sys.executable, "-c", SCRIPT, path, status], check=False)
    assert (done.returncode, path.exists()) == (0, False)


def test_what_is_printed_is_also_in_a_file(tmp_path: Path) -> None:
    script = SCRIPT.rpartition("give_up")[0] + "{}['é']"
    command = [sys.executable, "-c", script, tmp_path / "error.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'é'\n")
    assert (tmp_path / "traceback.txt").read_text() == done.stderr
