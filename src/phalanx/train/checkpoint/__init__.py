"""Checkpoints: complete or not there at all, checksummed, sharded, written behind the training loop's back.

On `torch.distributed.checkpoint`: its planner says which part of a tensor a rank has, and which parts of which files
a rank needs, whatever wrote them. The files are ours: DCP's own keep their table of contents as a pickle, which runs
code when it is read, and have neither checksums nor a commit. Here tensors lie in plain safetensors files and
everything else in JSON.
"""

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.checkpoints import Checkpoints
from phalanx.train.checkpoint.export import export
from phalanx.train.checkpoint.folder import Info
from phalanx.train.checkpoint.peers import Peers, SingleRank

__all__ = ["CheckpointError", "Checkpoints", "Info", "Peers", "SingleRank", "export"]
