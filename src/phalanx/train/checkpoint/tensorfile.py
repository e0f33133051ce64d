"""A safetensors file: a header of JSON, then raw tensors end to end. Any reader of that format opens ours.

Written here, not by the library, because the bytes are in one buffer already and are checksummed as they go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from phalanx.train.checkpoint.fault import CheckpointError

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


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    if dtype not in NAMES:
        raise CheckpointError(
            f"{tensor} is of {dtype}, which has no place in a safetensors file",
            details=[f"those that have: {', '.join(str(known).removeprefix('torch.') for known in NAMES)}"],
        )
    return NAMES[dtype]


def order(sizes: Sequence[int]) -> list[int]:
    """In which order items of these element sizes lie, so that each is aligned although there is no gap."""
    return sorted(range(len(sizes)), key=lambda place: -sizes[place])


def header(entries: Mapping[str, tuple[str, Sequence[int], int, int]], notes: Mapping[str, str]) -> bytes:
    """Of tensors, each with its dtype's name, shape, and where in the data it begins and ends."""
    table: dict[str, object] = {"__metadata__": dict(notes)}
    for name, (dtype, shape, begin, end) in entries.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the data of a mapped file are then aligned
    return len(text).to_bytes(8, "little") + text
