"""Damaged checkpoints: found, named, and never unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.train.checkpoint import CheckpointError, Checkpoints, Info, loading
from phalanx.train.checkpoint.format.folder import Folder
from tests.train.checkpoint.folders import FILES, empty, flip, flip_first, saved, steps, truncate


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [truncate, empty, flip, flip_first, Path.unlink])
def test_the_newest_intact_checkpoint_is_loaded_and_the_damaged_one_named(tmp_path: Path, file: str, harm: Any) -> None:
    model = saved(tmp_path, 1, 2)
    harm(tmp_path / "step-000000000002" / file)
    messages: list[str] = []
    with Checkpoints(tmp_path, keep_last=2, say=messages.append) as checkpoints:
        assert checkpoints.load({"model": model}).step == 1
        assert bool((model.weight == 1).all())
        assert [*checkpoints.bad] == ["step-000000000002"]
        (line,) = messages
        assert f"step-000000000002/{file}: " in line
        # It does not count among the kept ones.
        for step in (3, 4):
            assert "step-000000000001" in os.listdir(tmp_path)
            checkpoints.save(step, {"model": model})
            checkpoints.wait()
    assert steps(tmp_path) == [3, 4]


def test_the_error_says_what_is_damaged(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    file = tmp_path / "step-000000000001" / "rank-00000.safetensors"
    size = file.stat().st_size
    flip(file)
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*: 1 corrupted") as caught:
        Checkpoints(tmp_path, say=lambda _: None).load({"model": model})
    assert "rank-00000.safetensors: model.weight: checksum is " in caught.value.details[0]
    truncate(file)
    info = Info(1, str(tmp_path / "step-000000000001"))
    with pytest.raises(CheckpointError, match="is corrupted") as caught:
        Checkpoints(tmp_path).load({"model": model}, info)
    assert caught.value.details[0].endswith(f"rank-00000.safetensors: has {size - 3:,} bytes, {size:,} were written")
    assert Checkpoints(tmp_path).latest() is None


def test_a_chosen_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = saved(tmp_path, 1, 2, 3)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load({"model": model}, Folder(str(tmp_path)).info("step-000000000002")).step == 2
    assert bool((model.weight == 2).all())
    flip(tmp_path / "step-000000000003" / FILES[3])
    with pytest.raises(CheckpointError, match="step-000000000003 is corrupted"):
        checkpoints.load({"model": model}, checkpoints.latest())


@pytest.mark.extended
def test_reading_while_another_run_saves(tmp_path: Path) -> None:
    """The other run deletes old checkpoints while they are read. The reader then takes a newer one."""
    model = saved(tmp_path, 0)
    pid = os.fork()
    if pid == 0:
        saved(tmp_path, *range(1, 60), keep_last=1)
        os._exit(0)
    messages: list[str] = []
    seen = [0]
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        reader = Checkpoints(tmp_path, say=messages.append)
        seen.append(reader.load({"model": model}).step)
        assert bool((model.weight == seen[-1]).all())
    assert messages == []
    assert seen == sorted(seen)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", [*FILES, ".metadata", "data.pkl", "__0_0.distcp"])
def test_nothing_is_unpickled(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "checkpoints"
    model = saved(folder, 1, 2)
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    (folder / "step-000000000002" / file).write_bytes(bomb)
    os.mkdir(folder / "step-000000000003")
    (folder / "step-000000000003" / file).write_bytes(bomb)
    (folder / file).write_bytes(bomb)
    messages: list[str] = []
    with Checkpoints(folder, say=messages.append) as checkpoints:
        info = checkpoints.load({"model": model})
        checkpoints.save(5, {"model": model})
    assert info.step == (1 if file in FILES else 2)
    assert len(messages) == 3 - info.step
    assert not (tmp_path / "boom").exists()
    pickle.loads(bomb)
    assert (tmp_path / "boom").exists()


def test_a_file_truncated_while_it_is_read_raises(tmp_path: Path) -> None:
    """It raises an error instead of a SIGBUS."""
    saved(tmp_path, 1)
    path = tmp_path / "step-000000000001"
    folder = Folder(str(tmp_path))
    contents = loading.contents(folder.info(path.name), folder.manifest(path.name))
    file = loading._TensorFile(str(path), contents.tables[0])
    empty(path / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: is truncated"):
        file.checksum(0, 8)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: has 0 bytes"):
        loading.read(contents, {"model.weight": torch.empty(16, 32)})
