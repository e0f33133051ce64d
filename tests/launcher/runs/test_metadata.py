"""The metadata of a run: git within a time limit, versions of any interpreter, the file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.cluster import software
from phalanx.contract import events, hyperparameters
from phalanx.contract.run_metadata import FILE, RunMetadata
from phalanx.errors import UsageError
from phalanx.launcher import function_call
from phalanx.launcher.agent import metadata_recorder
from phalanx.launcher.command import Command
from phalanx.launcher.runs import git_state, metadata
from phalanx.launcher.runs.git_state import GitError, GitReader
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord
from phalanx.worker import given_hyperparameters

PATH = {"PATH": os.environ["PATH"]}
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    environ = {**PATH, "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}

    def run(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=trunk"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path / "repo", env=environ, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    (tmp_path / "repo" / "src").mkdir(parents=True)
    (tmp_path / "repo" / "src" / "train.py").write_text("lr = 1\n")
    run("init")
    return run


def test_the_state_of_a_repository(tmp_path: Path, git: Git) -> None:
    script = tmp_path / "repo" / "src" / "train.py"
    reader = GitReader(str(script), {**PATH, "GIT_DIR": "/nowhere"})
    new = reader.read()
    assert new is not None
    assert (new.root, new.commit, new.branch, new.dirty) == (str(tmp_path / "repo"), "", "trunk", True)
    git("add", "-A")
    git("commit", "-qm", "one")
    clean = reader.read()
    assert clean is not None
    assert (clean.commit, clean.branch, clean.dirty, clean.diff) == (git("rev-parse", "HEAD"), "trunk", False, "")
    script.write_text("lr = 2\n")
    changed = reader.read()
    assert changed is not None
    assert changed.dirty
    assert "-lr = 1\n+lr = 2\n" in changed.diff
    other = script.with_name("untracked.py")
    other.write_text("")
    git("checkout", "-q", "--detach")
    git("checkout", "-q", ".")
    untracked = GitReader(str(other), PATH).read()
    assert untracked is not None
    assert (untracked.branch, untracked.dirty, untracked.diff) == ("", True, "")  # detached; the script has no commit
    assert GitReader(str(tmp_path / "train.py"), PATH).read() is None


def test_a_long_diff_is_cut(tmp_path: Path, git: Git) -> None:
    git("add", "-A")
    git("commit", "-qm", "one")
    (tmp_path / "repo" / "src" / "train.py").write_text("x = 1\n" * 100_000)
    found = GitReader(str(tmp_path / "repo"), PATH).read()
    assert found is not None
    assert (len(found.diff), found.diff_truncated, found.dirty) == (git_state.MOST_DIFF, True, True)


def test_the_repository_starts_no_program(tmp_path: Path, git: Git) -> None:
    git("add", "-A")
    git("commit", "-qm", "one")
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o700)
    for name in ("core.fsmonitor", "core.pager", "pager.diff", "diff.external", "diff.trap.command"):
        git("config", name, str(trap))
    git("config", "diff.trap.textconv", str(trap))
    (tmp_path / "repo" / ".git" / "info" / "attributes").write_text("*.py diff=trap\n")
    for hook in ("post-index-change", "post-checkout"):
        (tmp_path / "repo" / ".git" / "hooks" / hook).symlink_to(trap)
    (tmp_path / "repo" / "src" / "train.py").write_text("lr = 2\n")
    (tmp_path / "sprung").unlink(missing_ok=True)
    found = GitReader(str(tmp_path / "repo" / "src" / "train.py"), PATH).read()
    assert found is not None
    assert "+lr = 2" in found.diff
    assert not (tmp_path / "sprung").exists()


def test_a_git_that_hangs_or_is_missing_costs_a_note(tmp_path: Path, git: Git) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    with pytest.raises(GitError, match="git is not installed"):
        GitReader(str(tmp_path / "repo"), {"PATH": str(tools)}).read()
    broken = tools / "git"
    broken.write_text("#!/bin/sh\nexec sleep 1000\n")
    broken.chmod(0o700)
    before = time.monotonic()
    reader = GitReader(str(tmp_path / "repo"), {"PATH": f"{tools}:{PATH['PATH']}"}, timeout=0.3)
    with pytest.raises(GitError, match=r"git did not answer within 0\.3 s"):
        reader.read()
    assert time.monotonic() - before < 60  # of the 1,000 s that git would take
    assert not reader.pids
    broken.write_text("#!/bin/sh\nexit 128\n")
    with pytest.raises(GitError, match="git rev-parse failed with exit code 128"):
        reader.read()


def _record(folder: Path) -> RunRecord:
    return RunRecord("a.2", 1, 1, ["python", "-u", "t.py"], "/home/me", str(folder), 2, 5.0, name="a")


def test_the_file_is_private_and_read_again(tmp_path: Path) -> None:
    command = Command("script", "t.py", ("--lr", "0.1"), sys.executable)
    found = metadata.surveyed(metadata.describe(_record(tmp_path), command, {"seed": 3}), sys.executable, {})
    assert (found.run, found.name, found.script, found.arguments) == ("a.2", "a", "/home/me/t.py", ("--lr", "0.1"))
    assert found.hyperparameters == {"lr": 0.1, "seed": 3}
    assert found.versions["python"] == sys.version.split()[0]
    assert found.machine is not None
    assert found.machine.cpus == len(os.sched_getaffinity(0))
    metadata.write(str(tmp_path), found)
    assert metadata.read(str(tmp_path)) == found
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    for damage in (b"", b"{}", b"[" * 100_000, b"\xff"):
        (tmp_path / FILE).write_bytes(damage)
        assert metadata.read(str(tmp_path)) is None


def test_another_interpreter_is_asked(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch-9.8.dist-info").mkdir()
    (site / "nvidia_nccl_cu12-2.30.dist-info").mkdir()
    (site / "torch" / "version.py").write_text("cuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    command = Command("script", "t.py", (), str(python))
    plain = metadata.describe(_record(tmp_path), command, {})
    found = metadata.surveyed(plain, str(python), {"PYTHONPATH": str(site)})
    assert {name: found.versions[name] for name in ("torch", "nccl", "cuda", "python")} == {
        "torch": "9.8",
        "nccl": "2.30",
        "cuda": "12.9",
        "python": sys.version.split()[0],
    }
    gone = metadata.surveyed(plain, "/nowhere/python", {})
    assert gone.notes == ("the versions of /nowhere/python are not known: FileNotFoundError",)
    assert "cuda" not in software.complete({}, [str(tmp_path)])


def test_what_a_script_gives_replaces_what_its_arguments_say(tmp_path: Path) -> None:
    environ = {"PHALANX_RUN_FOLDER": str(tmp_path), "RANK": "1"}
    given_hyperparameters.record({"lr": 0.2}, environ)
    assert metadata.given_by_script(str(tmp_path)) is None  # only rank 0 writes
    given_hyperparameters.record({"lr": 0.2, "path": Path("/x")}, {**environ, "RANK": "0"})
    given = metadata.given_by_script(str(tmp_path))
    assert given == {"lr": 0.2, "path": "/x"}
    plain = RunMetadata(run="a", name="a", started=0.0, command=(), script="t.py", hyperparameters={"lr": 0.1, "b": 1})
    assert metadata.with_given(plain, given).hyperparameters == {"lr": 0.2, "b": 1, "path": "/x"}
    (tmp_path / hyperparameters.FILE).write_text('{"lr": {"a": 1}}')
    assert metadata.given_by_script(str(tmp_path)) is None
    with pytest.raises(UsageError, match="hyperparameters is a list, expected a mapping"):
        given_hyperparameters.record([1], environ)  # type: ignore[arg-type]


def test_arguments_of_a_function_are_hyperparameters() -> None:
    def train(lr: float, data: object, *, epochs: int = 3) -> None: ...

    assert function_call.simple_arguments(train, [0.1, object()]) == {"lr": 0.1, "epochs": 3}
    assert function_call.simple_arguments(train, []) == {}
    assert function_call.simple_arguments(lambda run, lr=0.1: None, [0.2]) == {"lr": 0.2}


def test_every_field_is_documented(request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "docs" / "reference" / "run-folder.md").read_text()

    def names(kind: type[msgspec.Struct]) -> set[str]:
        return {field.name for field in msgspec.structs.fields(kind)}

    from phalanx.contract import run_metadata

    for kind, prefix in ((RunMetadata, ""), (run_metadata.GitState, "git."), (run_metadata.Machine, "machine.")):
        for name in names(kind):
            assert f"`{prefix}{name}`" in text, f"{prefix}{name}"


def test_a_node_that_takes_the_lead_describes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_recorder, "_INTERVAL", 0.01)
    described, asked = asyncio.Event(), asyncio.Event()

    class Links:
        changed = False

        @property
        def leads(self) -> bool:
            if threading.current_thread() is threading.main_thread():  # when it would publish
                asked.set()
            return self.changed

    def happened(line: bytes) -> None:
        if isinstance(event := events.decode(line), events.RunDescribed):
            assert event.metadata.run == _record(tmp_path).id
            described.set()

    folder = RunFolder(str(tmp_path))
    folder.record(_record(tmp_path))
    folder.listeners.append(happened)
    plan = SimpleNamespace(command=Command("script", "t.py", (), sys.executable), hyperparameters={}, environ={})
    links = Links()
    context: Any = SimpleNamespace(agent=SimpleNamespace(plan=plan), folder=folder, links=links)

    async def act() -> None:
        recorder = metadata_recorder.MetadataRecorder(context)
        recorder.start()
        try:
            async with asyncio.timeout(60):
                await asked.wait()
                assert not described.is_set()  # the leader's counts for all nodes
                links.changed = True
                await described.wait()
        finally:
            await recorder.end()

    asyncio.run(act())
    folder.close()
