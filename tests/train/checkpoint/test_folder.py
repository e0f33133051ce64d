"""The folder of checkpoints: names, leftovers, and one writer at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from phalanx.train.checkpoint import CheckpointError, Checkpoints
from phalanx.train.checkpoint.format.folder import Folder
from tests.train.checkpoint.folders import saved, steps


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    model = saved(tmp_path, 7, 8)
    assert sorted(os.listdir(tmp_path))[1:] == ["step-000000000007.2", "step-000000000008"]
    for number in (9, 10):
        os.mkdir(tmp_path / f"step-000000000007.{number}")
    assert Folder(str(tmp_path)).names()[1:3] == ["step-000000000007.10", "step-000000000007.9"]
    assert Checkpoints(tmp_path).load({"model": model}).step == 8


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    left = tmp_path / ".writing-step-000000000002-0123456789abcdef-1"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".removing-step-000000000000-0123").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert Checkpoints(tmp_path).latest().step == 1
    saved(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == [".lock", "notes.txt", "step-000000000001", "step-000000000003"]


def test_one_run_writes_to_a_folder(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    hold = (
        "import fcntl,sys; f=open(sys.argv[1],'r+'); fcntl.lockf(f,fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.load({"model": model}).step == 1  # reading needs no lock
            with pytest.raises(CheckpointError, match="another run is writing its checkpoints to"):
                checkpoints.open()
    with open(tmp_path / ".lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    saved(tmp_path, 2)


def test_one_writer_per_folder_in_a_process(tmp_path: Path) -> None:
    """The kernel grants a process its own lock twice, and releases it at the first close."""
    first = Checkpoints(tmp_path)
    first.open()
    with Checkpoints(tmp_path / "." / "..") as elsewhere:
        elsewhere.open()
    with Checkpoints(tmp_path) as second:
        with pytest.raises(CheckpointError, match=r"already written to .* by this process"):
            second.open()
        assert second.latest() is None
    first.save(1, {})
    first.close()
    with Checkpoints(tmp_path) as second:
        second.open()
    second = Checkpoints(tmp_path)
    second.open()
    del second  # not closed
    with Checkpoints(tmp_path) as third:
        third.open()


def test_a_forked_child_closes_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(256, 256)})
        pid = os.fork()
        if pid == 0:
            checkpoints.close()
            with pytest.raises(CheckpointError, match="belong to the parent of this process"):
                checkpoints.save(3, {})
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        checkpoints.save(2, {})
    assert steps(tmp_path) == [1, 2]
