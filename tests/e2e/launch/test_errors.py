"""Bad input gets a clear error: what was seen, what to type, exit code 2, no traceback of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx.errors import ScriptError
from phalanx.launcher.command import Command
from phalanx.launcher.coordination import port
from tests.kit.cli import phalanx, run

pytestmark = pytest.mark.smoke
BAD = {
    "no script": (("run",), "there is no script to run"),
    "no such script": (("run", "nowhere.py"), "no such script: nowhere.py"),
    "a directory": (("run", "folder"), "folder is a directory without a __main__.py"),
    "no slots": (("run", "-g", "0", "t.py"), "-g"),
    "slots that are no number": (("run", "-g", "8,x", "t.py"), '"x" is not a whole number'),
    "unknown option": (("run", "--nproc-per-nodes", "2", "t.py"), "--nproc-per-node?"),
    "unknown verb": (("rnu", "t.py"), "phalanx run"),
    "forgot the verb": (("t.py", "--lr", "1"), "fix: phalanx run t.py --lr 1"),
    "no address of node 0": (("run", "-n", "2", "-g", "2,2", "t.py"), "the address of node 0 is missing"),
    "no such program": (("run", "--no-python", "no-such-program"), "no such program"),
    "not executable": (("run", "--no-python", "./t.py"), "chmod u+x"),
    "a bad device": (("run", "--devices", "7", "t.py"), "--devices"),
    "a gpu where there is none": (("run", "--nproc-per-node", "gpu", "t.py"), "no GPU is usable on this node"),
    "an address of another machine": (("run", "--master-addr", "192.0.2.1", "--master-port", "1", "t.py"), "192.0.2.1"),
    "stop nothing": (("stop",), "nothing is running"),
    "stop who": (("stop", "nobody"), "no run called nobody"),
    "warm for ever": (("warm", "--for", "ever"), "--for"),
}


@pytest.mark.parametrize(("args", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "folder").mkdir()
    result = phalanx(*args, cwd=str(tmp_path))
    assert result.code == 2, result.err
    assert words in result.err
    assert result.err.startswith("phalanx: ")
    assert "Traceback" not in result.err
    assert not Path(os.environ["PHALANX_HOME"], "runs").exists()


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "t.py").chmod(0)
    tmp_path.chmod(0o755)
    # Root can read everything, so permissions need another user. That user cannot run this interpreter, hence a fork
    # instead of a command.
    pid = os.fork()
    if pid == 0:
        code = 44
        try:
            os.chdir(tmp_path)
            if os.getuid() == 0:
                os.setuid(65534)
            Command("script", "t.py", (), "py").check()
        except ScriptError as error:
            code = 42 if str(error) == "t.py cannot be read by this user\n  fix: chmod u+r t.py" else 43
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_a_port_in_use_says_who_holds_it(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    with port.listen("127.0.0.1", 0) as taken:
        number = taken.getsockname()[1]
        result = phalanx("run", "--master-port", str(number), "t.py", cwd=str(tmp_path))
    assert result.code == 2
    assert f"port {number} on 127.0.0.1 is in use" in result.err
    assert f"held by pid {os.getpid()}" in result.err


def test_the_current_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    gone = tmp_path / "gone"
    gone.mkdir()
    enter = ("sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone))
    result = run((*enter, sys.executable, "-m", "phalanx", "run", str(tmp_path / "t.py")))
    assert result.code == 2
    assert result.err == "phalanx: the current folder has been removed\n  fix: cd to one that exists\n"


def test_help_and_version() -> None:
    assert "phalanx run -g 4 train.py" in phalanx("--help").out
    assert phalanx("--version").out.startswith("phalanx 0.")
    shown = phalanx("run", "--help")
    assert shown.code == 0
    assert "--slots" in shown.out
    assert phalanx("help", "run").out == shown.out
    assert "--nproc-per-node" in phalanx("run", "--help-all").out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("launch t.py", "run t.py"),
        ("train", "run"),
        ("ls", "ps"),
        ("status", "ps"),
        ("kill x", "stop x"),
        ("rnu", "run"),
    ],
)
def test_a_verb_of_another_program(typed: str, meant: str) -> None:
    refused = phalanx(*typed.split())
    assert refused.code == 2
    assert refused.err.startswith(f"phalanx: {typed.split(maxsplit=1)[0]} is not a verb of phalanx; did you mean ")
    assert refused.err.endswith(f"\n  fix: phalanx {meant}\n")


def test_a_rank_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    for option in ("--show-ranks", "--stdin"):
        refused = phalanx("plan", "-g", "2", "--cpu", option, "2", "t.py", cwd=str(tmp_path))
        assert refused.code == 2
        assert refused.err.startswith(f"phalanx: {option} names rank 2, but there are 2 ranks: 0-1\n  fix: ")


def test_the_agent_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    result = phalanx("run", "-g", "1", "--cpu", "t.py", cwd=str(tmp_path), env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert result.code == 0
    imported = [line.rsplit("|", 1)[1].strip() for line in result.err.splitlines() if line.startswith("import time:")]
    assert "phalanx.launcher.agent.agent" in imported
    assert not {"torch", "numpy", "rich", "psutil", "pynvml"} & set(imported)
