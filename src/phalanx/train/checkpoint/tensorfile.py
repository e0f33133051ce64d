"""A safetensors file: a header of JSON, then raw tensors end to end. Any reader of that format opens ours.

Written here, not by the library, because the bytes are in one buffer already and are checksummed as they go.
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

Entry = tuple[str, Sequence[int], int, int]  # dtype's name, shape, where in the data it begins and ends


def dtype_name(dtype: torch.dtype) -> str:
    """As safetensors calls it, or as torch does, where the format has no such thing."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name} is no dtype of torch {torch.__version__}")
    return found


def entries(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Entry]:
    """Of tensors that lie in this order. What the format has no word for (complex128) is bytes to it."""
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
    """In which order items of these element sizes lie, so that each is aligned although there is no gap."""
    return sorted(range(len(sizes)), key=lambda place: -sizes[place])


def header(entries: Mapping[str, Entry], notes: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(notes)}
    for name, (dtype, shape, begin, end) in entries.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data of a mapped file are then aligned
    return len(text).to_bytes(8, "little") + text
