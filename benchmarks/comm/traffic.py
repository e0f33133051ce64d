"""The data that an operation moves: sizes and bandwidths as in nccl-tests, and the minimum for memory and links.

`size` is the one of nccl-tests: the tensor of all_reduce, broadcast and reduce; all parts together of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

COPY = "copy"  # no collective: every rank copies `size` bytes at the same time


@dataclass(frozen=True)
class CommOperation:
    """A collective or point-to-point operation."""

    name: str
    bus: str  # which share of `size` crosses each rank's link: see bus_factor
    place: str = "out"  # "in": torch has it only in place; "both": either way
    parts: bool = False  # the tensor has one part per rank
    sized: bool = True


OPERATIONS = {
    operation.name: operation
    for operation in (
        CommOperation("all_reduce", "twice", place="in"),
        CommOperation("broadcast", "whole", place="in"),
        CommOperation("reduce", "whole", place="in"),
        CommOperation("all_gather", "others", parts=True),
        CommOperation("all_gather_into_tensor", "others", place="both", parts=True),
        CommOperation("reduce_scatter", "others", parts=True),
        CommOperation("reduce_scatter_tensor", "others", place="both", parts=True),
        CommOperation("all_to_all", "others", parts=True),
        CommOperation("all_to_all_single", "others", parts=True),
        CommOperation("gather", "others", parts=True),
        CommOperation("scatter", "others", parts=True),
        CommOperation("barrier", "none", sized=False),
        CommOperation("sendrecv", "whole"),  # a ring: each rank sends to the next
        CommOperation("pingpong", "whole"),  # first and last rank; half of a round trip
    )
}


def bus_factor(name: str, ranks: int) -> float:
    """Return the bus bandwidth divided by the algorithm bandwidth."""
    match OPERATIONS[name].bus:
        case "twice":
            return 2 * (ranks - 1) / ranks
        case "others":
            return (ranks - 1) / ranks
        case "whole":
            return 1.0
        case _:
            return 0.0


def passes(name: str, ranks: int, place: str) -> float:
    """Return the least memory traffic of an operation, relative to every rank copying `size` bytes at the same time.

    Every input byte is read once, every output byte is written once, and nothing that stays in place is moved.
    """
    n = ranks
    kind = _KINDS.get(name, name)
    if kind in ("barrier", "pingpong") and n < 2:
        return 0.0
    stays = 1 if place == "in" else 0  # parts that are already in place
    read, written = {
        "all_reduce": (n, n),
        "broadcast": (1, n - 1),
        "reduce": (n, 1),
        "all_gather": (1, n - stays),
        "reduce_scatter": (n, 1),
        "all_to_all": (n, n),
        "gather": (1, 1),
        "scatter": (1, 1),
        "sendrecv": (n, n),
        "pingpong": (1, 1),
        "barrier": (0, 0),
    }[kind]
    if n == 1 and place == "in":
        return 0.0
    return (read + written) / (2 * n)


def over_links(name: str, size: float, ranks: int, nodes: int, local: int) -> float:
    """Return the least bytes that leave or enter the busiest of `nodes`, which has `local` of the `ranks`."""
    if nodes < 2:
        return 0.0
    away = (nodes - 1) / nodes
    match _KINDS.get(name, name):
        case "all_reduce":
            return 2 * away * size
        case "broadcast" | "reduce" | "sendrecv" | "pingpong":
            return size
        case "all_to_all":
            return local * size * (ranks - local) / ranks
        case "all_gather" | "reduce_scatter" | "gather" | "scatter":
            return away * size
        case _:
            return 0.0


_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}

DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}


def elements(name: str, size: int, ranks: int, dtype: str) -> int:
    """Return how many elements fit in `size`, the same for every rank."""
    count = size // DTYPES[dtype]
    return max(1, count // ranks) * ranks if OPERATIONS[name].parts else max(1, count)


def size_range(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """Return begin, begin * factor, … up to end."""
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}


def parse_size(text: str) -> int:
    """Parse 64K, 25M, 1G or a number of bytes; ValueError for anything else."""
    bare = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = bare[-1:] if bare[-1:] in ("k", "m", "g") else ""
    size = int(bare.removesuffix(unit)) * _UNITS[unit]
    if size < 1:
        raise ValueError(text)
    return size


def format_size(size: int) -> str:
    """Return a size with its unit, such as 64 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size * 100 % unit == 0:
            return f"{size / unit:g} {name}"
    return f"{size} B" if size else "-"
