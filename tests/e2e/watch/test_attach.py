"""A debugger in one rank: at a breakpoint, in the run's terminal or later; at any place; on another node."""

from __future__ import annotations

import re
import signal
import termios
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.places import script
from tests.kit import cli
from tests.kit.cli import Env, Result, phalanx, start, terminal
from tests.kit.handle import Terminal
from tests.kit.lab import Lab

SCRIPT = script("debugged.py")
LINE = next(number for number, line in enumerate(Path(SCRIPT).read_text().splitlines(), 1) if "breakpoint()" in line)
PROMPT = "(Pdb) "

staged = pytest.mark.xdist_group("attach")  # they share a warm fork server


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with cli.warm_environment() as env:
        yield env


def words(mode: str, folder: Path) -> tuple[str, ...]:
    return ("run", "-g", "2", "--cpu", SCRIPT, mode, str(folder))


def typed(job: Terminal, *commands: str, before: int = 0) -> None:
    """Type each line at its own prompt."""
    for count, command in enumerate(commands, before + 1):
        job.wait_for(PROMPT, count)
        job.send(command.encode())


def attach(env: Env, rank: int, *commands: str) -> Result:
    return phalanx("attach", str(rank), *(word for command in commands for word in ("-c", command)), env=env)


@staged
def test_a_breakpoint_has_the_terminal_and_the_time_it_needs(env: Env, tmp_path: Path) -> None:
    job = terminal(*words("breakpoint", tmp_path), env=env, size=(24, 200))
    before = termios.tcgetattr(job._keys)
    typed(job, "p secret * 2\n", "\x03", "n\n", "n\n", "c\n")
    typed(job, "up\n", "p rank + 100\n", "c\n", before=5)  # torch's own breakpoint
    assert job.wait() == 0, job.out
    assert termios.tcgetattr(job._keys) == before
    text = job.out.replace("\r", "")
    assert re.search(rf"rank 1 is at a breakpoint, \S*debugged.py:{LINE + 1}, and has the terminal", text)
    assert "(Pdb) p secret * 2\n84\n(Pdb) ^C--KeyboardInterrupt--\n(Pdb) n\n" in text
    assert "(Pdb) n\nstepped over\n> " in text  # no prefix, and before the prompt
    # Written while rank 1 was being debugged, shown afterwards.
    assert "patient" in text[text.index("(Pdb) c\n") :]
    assert "patient" not in text[: text.index("(Pdb) c\n")]
    assert len(re.findall(r"waits 120 s again", text)) == 2
    assert "(Pdb) p rank + 100\n101\n" in text


@staged
def test_one_after_the_other_and_ctrl_d_as_pdb_has_it(env: Env, tmp_path: Path) -> None:
    job = terminal(*words("both", tmp_path), env=env, size=(24, 200))
    job.wait_for("until the terminal is free")
    typed(job, "p rank\n", "c\n", "p rank\n", "\x04")
    assert job.wait() == 1
    assert sorted(re.findall(r"p rank\r?\n(\d)", job.out)) == ["0", "1"]
    assert len(re.findall(r"continues \d", job.out)) == 1
    assert "BdbQuit" in job.out


@staged
def test_without_a_terminal_it_waits_for_one(env: Env, tmp_path: Path) -> None:
    job = start(*words("breakpoint", tmp_path), env=env)
    (found,) = job.wait_for(re.compile(rf"rank 1 waits at a breakpoint, \S+:{LINE + 1}: phalanx (attach 1 \S+)"))
    ask = found[1].split()
    with terminal(*ask, env=env) as lost:
        lost.wait_for(PROMPT)
        lost.signal(signal.SIGKILL)
        lost.wait()
    job.wait_for("waits at a breakpoint", count=2)  # the first debugger has left
    assert phalanx(*ask, "-c", "p secret", "-c", "c", env=env).out.splitlines()[-1] == "42"
    job.wait_for("waits at a breakpoint", count=3)
    with terminal(*ask, env=env) as job_of_its_own:
        typed(job_of_its_own, "up\n", "p rank\n", "c\n")
        assert job_of_its_own.wait() == 0
        assert "p rank\r\n1\r\n" in job_of_its_own.out
    assert job.wait() == 0, job.both


@pytest.mark.smoke
@staged
def test_a_running_rank_is_looked_at_and_continues(env: Env, tmp_path: Path) -> None:
    job = start(*words("busy", tmp_path), env=env)
    name = Path(job.wait_for(re.compile(r"output in (\S+)"))[0][1]).name
    job.wait_for("begun", 2)
    cli.until(lambda: "native code" in attach(env, 1, "n").out, 60, "rank 1 to be in its collective")
    with terminal("attach", "0", env=env) as held:
        held.wait_for(PROMPT)
        refused = attach(env, 0, "where")
        assert (refused.code, refused.out) == (1, "")
        assert f"rank 0 is already being debugged by process {held.pid}" in refused.err
        typed(held, "b compute\n", "c\n", "n\n", "p word\n", "p step + 0\n")
        held.wait_for(PROMPT, 6)
        (first,) = re.findall(r"p step \+ 0\r?\n(\d+)\r?\n", held.out)
        assert f"'step {first}'" in held.out
        typed(held, "cl 1\n", "c\n", before=5)  # no breakpoint left: the rank continues
        assert held.wait() == 0
    with terminal("attach", "0", env=env) as lost:  # while nothing stops: no prompt would notice
        typed(lost, "b limit\n", "c\n")
        lost.signal(signal.SIGKILL)
        lost.wait()
    cli.until(lambda: attach(env, 0, "p 1").code == 0, 60, "rank 0 to be let go")
    later = attach(env, 0, "import __main__", "__main__.step", "where")
    assert later.code == 0
    assert "debugged.py" in later.out
    assert int(re.findall(r"(?m)^\d+$", later.out)[0]) > int(first)
    stuck = attach(env, 1, "p rank + 100", "where")
    assert "\n101\n" in stuck.out  # the frame of the script
    assert "barrier()" in stuck.out
    missing = attach(env, 2, "where")
    assert missing.code == 1
    assert "there is no rank 2" in missing.err
    listens = phalanx("attach", "0", "--debugpy", "0", env=env)
    if find_spec("debugpy") is None:
        assert "debugpy is not installed in" in listens.err
    else:
        assert re.search(r"rank 0 waits for an IDE at 127.0.0.1:\d+ on \S+", listens.out), listens.err
    Path(tmp_path, "flag").touch()
    assert job.wait() == 0, job.both
    assert f"{name} has ended" in phalanx("attach", "0", name, env=env).err


@pytest.mark.warmed
def test_a_rank_of_another_node(lab: Lab, tmp_path: Path) -> None:
    same = ("-n", "2", "-g", "1,1", "--master", lab[0].name, "--cpu", SCRIPT, "breakpoint", str(tmp_path))
    first = lab[0].terminal("run", "-i", "0", *same, size=(24, 200))
    second = lab[1].start("run", "-i", "1", *same)
    typed(first, "p secret\n")
    first.wait_for("42")
    far = lab[1].run("attach", "0", "-c", "p rank + 100")
    assert "only node 0 may attach a debugger to ranks of other nodes (--attach-from leader)" in far.err
    taken = lab[0].run("attach", "1", "-c", "p 1")
    assert "rank 1 is already being debugged by the terminal of phalanx run of another node" in taken.err
    typed(first, "\x03", "c\n", "c\n", before=1)
    assert first.wait() == 0, first.out + second.both
    assert second.wait() == 0, second.both
    assert "--KeyboardInterrupt--" in first.out
