"""A disk that becomes full during a save: `checkpoint_full.py FOLDER`, on a file system of 8 MiB."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from phalanx.train.checkpoint import CheckpointError, Checkpoints, export

folder = sys.argv[1]
small, big = nn.Linear(512, 512), nn.Linear(2048, 2048)
want = small.weight.detach().clone()
messages: list[str] = []
checkpoints = Checkpoints(folder, buffers=1, say=messages.append)
checkpoints.save(1, {"model": small})
checkpoints.wait()

# It is reported; training and later saves continue.
checkpoints.save(2, {"model": big})
checkpoints.save(3, {"model": big})  # needs the buffer, so the other save must have finished
(line,) = messages
assert line.startswith("phalanx: the checkpoint of step 2 was not written"), line
assert "No space left on device" in line, line
with pytest.raises(CheckpointError, match="step 3 was not written"):
    checkpoints.wait()
assert sorted(os.listdir(folder)) == [".lock", "step-000000000001"], os.listdir(folder)
small.weight.data.zero_()
info = checkpoints.load({"model": small})
assert info is not None
assert info.step == 1
assert torch.equal(small.weight, want)
checkpoints.save(4, {"model": small})  # which fits
checkpoints.close()
assert len(messages) == 1, messages
latest = Checkpoints(folder).latest()
assert latest is not None
assert latest.step == 4

with pytest.raises(CheckpointError, match="No space left on device"):
    export(big, f"{folder}/model.safetensors")
with pytest.raises(CheckpointError):
    export(big, f"{folder}/model.pt")
assert not any(name.startswith("model") for name in os.listdir(folder)), os.listdir(folder)

# Full of leftovers of a killed saver: the next one makes room before it needs any.
os.unlink(f"{folder}/.lock")
os.mkdir(f"{folder}/.writing-step-000000000005-00-1")
with open(f"{folder}/.writing-step-000000000005-00-1/rank-00000.safetensors", "wb", buffering=0) as file:
    while file.write(bytes(4096)) and os.statvfs(folder).f_bavail:
        pass
with Checkpoints(folder) as checkpoints:
    checkpoints.save(6, {"model": small})
assert sorted(os.listdir(folder)) == [".lock", "step-000000000004", "step-000000000006"], os.listdir(folder)

# The next one replaces an older one, if there is no room for both. The newest is kept.
with Checkpoints(folder, say=messages.append) as checkpoints:
    assert not checkpoints.make_room()  # there is room
    with open(f"{folder}/ballast", "wb", buffering=0) as file:
        while file.write(bytes(4096)) and os.statvfs(folder).f_bavail:
            pass
    checkpoints.save(7, {"model": small})
    with pytest.raises(CheckpointError, match="step 7 was not written"):
        checkpoints.wait()
    assert checkpoints.make_room()
    assert messages[-1].startswith("phalanx: removed step-000000000004 from"), messages
    checkpoints.save(7, {"model": small})
    checkpoints.wait()
names = sorted(os.listdir(folder))
assert names == [".lock", "ballast", "step-000000000006", "step-000000000007"], names
print("as it should be")
