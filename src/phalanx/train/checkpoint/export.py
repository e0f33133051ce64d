"""A whole model as one file, with the names of the unwrapped model: `export(model, "model.safetensors")`, or `.pt`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.errors import CheckpointError, OptionError
from phalanx.train.checkpoint.format import integrity, tensorfile
from phalanx.train.checkpoint.format.buffer import Buffer
from phalanx.train.checkpoint.peers import Broadcaster, SingleRank
from phalanx.train.checkpoint.shares import Chunk
from phalanx.train.checkpoint.state import plain_name, unwrapped

Named = Iterator[tuple[str, torch.Tensor]]


def export(model: nn.Module, path: str | os.PathLike[str], peers: Broadcaster | None = None) -> None:
    """Write the model to one file, atomically. Every rank must call it; rank 0 writes.

    Sharded tensors are gathered one at a time. A .safetensors file is written tensor by tensor, so that no rank holds
    the whole model; for a .pt file rank 0 does.
    """
    peers = peers if peers is not None else SingleRank()
    path = os.path.abspath(os.fspath(path))
    kind = os.path.splitext(path)[1]
    if kind not in (".safetensors", ".pt"):
        raise OptionError(f'"{path}" must end in .safetensors or .pt', fix=f"{os.path.splitext(path)[0]}.safetensors")
    found = {plain_name(key): value for key, value in unwrapped(model).state_dict().items()}
    tensors = {key: value.detach() for key, value in found.items() if isinstance(value, torch.Tensor)}
    if kind == ".safetensors":
        tensors = _laid_out(tensors)
    wholes = _wholes(tensors)
    failure = ""
    if peers.rank == 0:
        part = f"{path}.{secrets.token_hex(4)}.part"
        try:
            if kind == ".pt":
                _write_pt(wholes, part)
            else:
                _write_safetensors(tensors, wholes, part)
            os.rename(part, path)
            integrity.sync_folder(os.path.dirname(path))
        except (OSError, RuntimeError) as error:
            failure = str(getattr(error, "strerror", None) or error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)
    for _ in wholes:
        pass  # gathering needs all ranks, even if rank 0 could not write
    failure = peers.broadcast(failure)
    if failure:
        raise CheckpointError(f"the model could not be written to {path}: {failure}", fix="export it to another place")


def _wholes(tensors: Mapping[str, torch.Tensor]) -> Named:
    for name, tensor in tensors.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid_out(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in the order of the file."""
    for name, tensor in tensors.items():
        if tensor.dtype not in tensorfile.NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in tensorfile.NAMES)
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, which safetensors does not support",
                details=[f"supported: {known}"],
                fix="export it to a .pt file",
            )
    names = [*tensors]
    return {
        names[place]: tensors[names[place]] for place in tensorfile.order([t.element_size() for t in tensors.values()])
    }


def _write_safetensors(tensors: Mapping[str, torch.Tensor], wholes: Named, path: str) -> None:
    header = tensorfile.header(tensorfile.entries(tensors.items()), {"format": "pt"})
    buffer = Buffer()
    try:
        with open(path, "xb", buffering=0) as file:
            integrity.write_all(file.fileno(), memoryview(header))
            for name, tensor in wholes:
                (placed,) = buffer.take([Chunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)])
                buffer.ready()
                integrity.write_all(file.fileno(), buffer.view(0, placed.end))
            os.fsync(file.fileno())
    finally:
        buffer.close()


def _write_pt(wholes: Named, path: str) -> None:
    whole = {name: _alone(tensor.cpu()) for name, tensor in wholes}
    with open(path, "xb") as file:
        torch.save(whole, file)
        file.flush()
        os.fsync(file.fileno())


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its own storage: for a view, the whole storage would be written."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
