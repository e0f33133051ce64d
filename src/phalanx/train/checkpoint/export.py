"""A model as one file, whole, with the names of the unwrapped model: `export(model, "model.safetensors")`, or `.pt`."""

from __future__ import annotations

import contextlib
import os
import secrets

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.errors import OptionError
from phalanx.train.checkpoint import seal, tensorfile
from phalanx.train.checkpoint.buffer import Buffer
from phalanx.train.checkpoint.fault import CheckpointError
from phalanx.train.checkpoint.peers import Alone, Peers
from phalanx.train.checkpoint.shares import Chunk
from phalanx.train.checkpoint.state import plain_name, unwrapped


def export(model: nn.Module, path: str | os.PathLike[str], peers: Peers | None = None) -> None:
    """Called by every rank, for a sharded model is put together by all; written by rank 0. All there or not there."""
    peers = peers if peers is not None else Alone()
    path = os.path.abspath(os.fspath(path))
    kind = os.path.splitext(path)[1]
    if kind not in (".safetensors", ".pt"):
        raise OptionError(
            f'"{path}" ends neither in .safetensors nor in .pt', fix=f"{os.path.splitext(path)[0]}.safetensors"
        )
    whole: dict[str, torch.Tensor] = {}
    for key, value in unwrapped(model).state_dict().items():
        if isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if peers.rank == 0:
                # One at a time: the whole model may be more than a device can hold.
                whole[plain_name(key)] = full.detach().cpu()
    failure = ""
    if peers.rank == 0:
        part = f"{path}.{secrets.token_hex(4)}.part"
        try:
            if kind == ".pt":
                _write_pt(whole, part)
            else:
                _write_safetensors(whole, part)
            os.rename(part, path)
            seal.sync_folder(os.path.dirname(path))
        except (OSError, RuntimeError, CheckpointError) as error:
            failure = str(getattr(error, "strerror", None) or error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)
    failure = peers.broadcast(failure)
    if failure:
        raise CheckpointError(f"the model could not be written to {path}: {failure}", fix="export it to another place")


def _write_pt(whole: dict[str, torch.Tensor], path: str) -> None:
    with open(path, "xb") as file:
        torch.save({name: tensor.clone() for name, tensor in whole.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(whole: dict[str, torch.Tensor], path: str) -> None:
    buffer = Buffer()
    try:
        placed = buffer.take(
            [Chunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in whole.items()]
        )
        entries = {
            item.chunk.name: (
                tensorfile.dtype_name(item.chunk.part.dtype, item.chunk.name),
                item.chunk.part.shape,
                item.begin,
                item.end,
            )
            for item in placed
        }
        with open(path, "xb", buffering=0) as file:
            seal.write_all(file.fileno(), memoryview(tensorfile.header(entries, {"format": "pt"})))
            seal.write_all(file.fileno(), buffer.view(0, placed[-1].end if placed else 0))
            os.fsync(file.fileno())
    finally:
        buffer.close()
