"""A disk that becomes full during a save: `checkpoint_full.py FOLDER`, on a file system of 8 MiB."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from phalanx.train.checkpoint import CheckpointError, Checkpoints

folder = sys.argv[1]
small, big = nn.Linear(512, 512), nn.Linear(2048, 2048)
want = small.weight.detach().clone()
checkpoints = Checkpoints(folder, buffers=1)
checkpoints.save(1, {"model": small})
checkpoints.wait()
checkpoints.save(2, {"model": big})
with pytest.raises(CheckpointError, match="step 2 was not written") as caught:
    checkpoints.save(3, {"model": big})  # needs the buffer, so the other has to be through
assert "No space left on device" in str(caught.value), caught.value
assert sorted(os.listdir(folder)) == [".lock", "step-000000000001"], os.listdir(folder)
small.weight.data.zero_()
info = checkpoints.load({"model": small})
assert info is not None
assert info.step == 1
assert torch.equal(small.weight, want)
checkpoints.save(4, {"model": small})  # which fits
checkpoints.close()
latest = Checkpoints(folder).latest()
assert latest is not None
assert latest.step == 4
print("as it should be")
