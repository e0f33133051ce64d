"""Objects of all ranks, exchanged as JSON over the default process group."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

T = TypeVar("T")


def all_gather_json(mine: object, kind: type[T] | Any) -> list[T]:
    """Return the objects of all ranks, by rank. Every rank must call it."""
    text = torch.frombuffer(bytearray(msgspec.json.encode(mine)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    longest = max(int(length) for length in lengths)
    room = torch.zeros(longest, dtype=torch.uint8)
    room[: len(text)] = text
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(rows, room)
    return [
        msgspec.json.decode(bytes(row[: int(length)].tolist()), type=kind)
        for row, length in zip(rows, lengths, strict=True)
    ]


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
