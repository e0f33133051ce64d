"""Checkpoints: atomic, checksummed, sharded, written in the background.

They use the planner of `torch.distributed.checkpoint`: which part of a tensor a rank has, and which parts of which
files it needs, however they were written. The file format is our own: DCP keeps its metadata as a pickle, which runs
code when it is read, and has neither checksums nor a commit. Here tensors are in plain safetensors files and all else
is JSON.
"""

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.checkpoints import Checkpoints
from phalanx.train.checkpoint.export import export
from phalanx.train.checkpoint.format.folder import Info
from phalanx.train.checkpoint.peers import Peers, SingleRank

__all__ = ["CheckpointError", "Checkpoints", "Info", "Peers", "SingleRank", "export"]
