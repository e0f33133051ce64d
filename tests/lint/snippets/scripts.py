"""All snippets by rule, and the scripts that contain them."""

from __future__ import annotations

import textwrap

from tests.lint.snippets import data, divergence, rank_collective

BAD = {**rank_collective.BAD, **divergence.BAD, **data.BAD}
GOOD = {**rank_collective.GOOD, **divergence.GOOD, **data.GOOD}

IMPORTS = """
import os, sys, io, time, random, tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
JOIN = """
dist.init_process_group()
rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
torch.cuda.set_device(local_rank)
"""
LEAVE = """
dist.destroy_process_group()
"""


def script(middle: str) -> str:
    """Return a script with this middle part, which joins the process group before it and leaves the group after it."""
    return IMPORTS + JOIN + textwrap.dedent(middle) + LEAVE


def whole(text: str) -> str:
    """Return a script with the imports that all have in common."""
    return IMPORTS + textwrap.dedent(text)
