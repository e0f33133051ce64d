"""What an operation moves: sizes and bandwidths as nccl-tests define them, and the least that memory or a link must do.

`size` is what nccl-tests calls so: the tensor of all_reduce, broadcast and reduce; all parts together of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

COPY = "copy"  # no operation: every rank copies `size` bytes, all at once


@dataclass(frozen=True)
class Operation:
    name: str
    bus: str  # which share of `size` crosses each rank's link: a name in _BUS
    place: str = "out"  # "in": torch has it in place only; "both": either way
    parts: bool = False  # `size` is that of one part for each rank
    sized: bool = True


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", "twice", place="in"),
        Operation("broadcast", "whole", place="in"),
        Operation("reduce", "whole", place="in"),
        Operation("all_gather", "others", parts=True),
        Operation("all_gather_into_tensor", "others", place="both", parts=True),
        Operation("reduce_scatter", "others", parts=True),
        Operation("reduce_scatter_tensor", "others", place="both", parts=True),
        Operation("all_to_all", "others", parts=True),
        Operation("all_to_all_single", "others", parts=True),
        Operation("gather", "others", parts=True),
        Operation("scatter", "others", parts=True),
        Operation("barrier", "none", sized=False),
        Operation("sendrecv", "whole"),  # a ring: each to the next
        Operation("pingpong", "whole"),  # the first and the last rank; half of a round trip
    )
}


def bus_factor(name: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
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
    """The least that memory must do for ranks of one machine, beside every rank's copying `size` bytes at once.

    Every byte that goes in is read once, every byte that comes out is written once, and nothing is moved that stays.
    """
    n = ranks
    kind = _KINDS.get(name, name)
    if kind in ("barrier", "pingpong") and n < 2:
        return 0.0
    stays = 1 if place == "in" else 0  # of the parts, those that are where they belong
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
    """The least bytes that leave or enter the busiest of `nodes`, `local` of the `ranks` on it."""
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
    """As many as fit in `size`, the same for every rank."""
    count = size // DTYPES[dtype]
    return max(1, count // ranks) * ranks if OPERATIONS[name].parts else max(1, count)


def ladder(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """begin, begin * factor, … up to end."""
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}


def read_size(text: str) -> int:
    """64K, 25M, 1G or bytes. ValueError if it is none."""
    bare = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = bare[-1:] if bare[-1:] in ("k", "m", "g") else ""
    size = int(bare.removesuffix(unit)) * _UNITS[unit]
    if size < 1:
        raise ValueError(text)
    return size


def write_size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size * 100 % unit == 0:
            return f"{size / unit:g} {name}"
    return f"{size} B" if size else "-"
