"""Safetensors files: a JSON header, then raw tensors. Any reader of that format can open them.

They are not written with the safetensors library: the bytes are already in one buffer, and the checksum is computed on
the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch

from phalanx.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Entry = tuple[str, Sequence[int], int, int]  # name of the dtype, shape, begin and end in the data


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors, or in torch if the format does not have it."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name."""
    found = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name}")
    return found


def entries(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Entry]:
    """Return the entries of tensors in this order. A dtype that the format lacks (complex128) is written as bytes."""
    found: dict[str, Entry] = {}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        known = tensor.dtype in NAMES
        found[name] = (
            NAMES.get(tensor.dtype, "U8"),
            list(tensor.shape) if known else [tensor.nbytes],
            begin,
            end,
        )
    return found


def order(sizes: Sequence[int]) -> list[int]:
    """Return the order of items with these element sizes in which each is aligned without gaps."""
    return sorted(range(len(sizes)), key=lambda place: -sizes[place])


def header(entries: Mapping[str, Entry], notes: Mapping[str, str]) -> bytes:
    """Return the header of a file."""
    table: dict[str, object] = {"__metadata__": dict(notes)}
    for name, (dtype, shape, begin, end) in entries.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # aligns the data of a mapped file
    return len(text).to_bytes(8, "little") + text
