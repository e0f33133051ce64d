"""`launcher/api`: every way to start a run is one function."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.options import parse_run
from phalanx.cli.planning import make_plan
from phalanx.errors import PortError
from phalanx.launcher import api
from phalanx.launcher.agent.run_hook import HookedAgent, NoHook
from phalanx.launcher.runs import run_folder


class Recorder(NoHook):
    def __init__(self) -> None:
        self.calls: list[object] = []

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        self.calls.append(len(sockets))

    def begin(self, agent: HookedAgent) -> None:
        self.calls.append(agent.plan.group.world_size)

    async def end(self, code: int) -> None:
        self.calls.append(f"exit code {code}")


def test_a_plan_runs_in_this_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'], flush=True); os._exit(3)")
    environ = {**os.environ, "PHALANX_HOME": str(tmp_path / "home")}
    plan = make_plan(parse_run(["--fresh", "-g", "2", "--cpu", str(script)], environ), environ)
    hook = Recorder()
    code = api.run_plan(plan, environ, hook=hook, findings=lambda plan, folder: [f"{folder.name} on {plan.group.role}"])
    assert code == 3
    assert hook.calls == [1, 2, "exit code 3"]
    (record,) = run_folder.all_runs(str(tmp_path / "home"))
    assert (record.code, record.pid) == (3, os.getpid())
    captured = capfd.readouterr()
    assert f"{record.id} on default" in captured.err
    # The first that exits ends the other, which may not have printed.
    assert re.search(r"\[([01])\] rank \1", captured.out)


def test_a_port_that_is_taken_is_found_before_anything_starts(tmp_path: Path) -> None:
    environ = {**os.environ, "PHALANX_HOME": str(tmp_path / "home")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--master-port", str(taken.getsockname()[1]), "-g", "2", "--cpu", __file__]
        plan = make_plan(parse_run(options, environ), environ)
        with pytest.raises(PortError):
            api.run_plan(plan, environ)
    assert not (tmp_path / "home").exists()


def test_the_command_line_and_launch_meet_there() -> None:
    """`launch` starts `phalanx run`, and that calls `run_plan`; import-linter keeps others from `node_run`."""
    assert phalanx.launch is api.launch
    commands = Path(phalanx.__file__).parent / "cli/commands"
    calls = {
        path.stem
        for path in commands.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run_plan"
    }
    assert calls == {"run"}
