"""Formats ranks, places, sizes and collectives as text."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable

from phalanx.diagnose.evidence import CallEvidence, Evidence, Frame

_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16,
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip


def numbers(ranks: Iterable[int]) -> str:
    """Return e.g. "0, 1, 3-7"."""
    ordered = sorted(set(ranks))
    parts: list[str] = []
    start = 0
    for index, rank in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == rank + 1:
            continue
        run = ordered[start : index + 1]
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
        start = index + 1
    return ", ".join(parts)


def who(ranks: Iterable[int]) -> str:
    """Return e.g. "rank 3" or "ranks 0, 1, 3-7"."""
    named = set(ranks)
    return f"rank{'' if len(named) == 1 else 's'} {numbers(named)}"


def verb(ranks: Iterable[int], one: str, several: str) -> str:
    """Return the singular or plural form for these ranks."""
    return one if len(set(ranks)) == 1 else several


def others(ranks: Iterable[int], evidence: Evidence, besides: Iterable[int]) -> str:
    """Return "the other 3", or their numbers if these are not all others."""
    named, all_ranks = set(ranks), {rank.rank for rank in evidence.ranks}
    if named and named == all_ranks - set(besides):
        return f"the other {len(named)}" if len(named) > 1 else f"the other one ({who(named)})"
    return who(named)


def file(path: str) -> str:
    """Return the name of a file, with its folder if the name alone is too generic."""
    parts = path.replace("\\", "/").split("/")
    return "/".join(parts[-2:]) if parts[-1] in ("__init__.py", "__main__.py") else parts[-1]


def place(frame: Frame | None) -> str:
    """Return e.g. "dataset.py:41 in __getitem__"."""
    if frame is None:
        return ""
    inside = "" if frame.function in ("", "<module>") else f" in {frame.function}"
    return f"{file(frame.file)}:{frame.line}{inside}"


def at(frame: Frame | None) -> str:
    """Return " at FILE:LINE", or nothing."""
    return f" at {place(frame)}" if frame is not None else ""


def inside(frame: Frame | None) -> str:
    """Return e.g. " inside `if rank == 0` at train.py:88"."""
    if frame is None:
        return ""
    return f"{f' inside `{frame.guard}`' if frame.guard else ''} at {place(frame)}"


def quantity(count: float) -> str:
    """Return a number of bytes."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def duration(seconds: float) -> str:
    """Return a duration."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def shapes(call: CallEvidence) -> str:
    """Return the shapes of a call."""
    return ", ".join("[" + ", ".join(map(str, shape)) + "]" for shape in call.shapes) or "nothing"


def elements(shape: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of elements of shapes."""
    return sum(math.prod(each) for each in shape)


def size(call: CallEvidence) -> int:
    """Return the bytes of a call; 0: unknown."""
    if not call.dtypes or not call.shapes:
        return 0
    return elements(call.shapes) * _BYTES.get(call.dtypes[0].removeprefix("torch."), 0)


def numbered(call: CallEvidence) -> str:
    """Return a call with its sequence number."""
    return f"{call.op} #{call.seq}" if call.seq > 0 else call.op


def exit_text(code: int) -> str:
    """Return how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def host(evidence: Evidence, node: int) -> str:
    """Return the host name of a node, or its number."""
    return next((each.host for each in evidence.nodes if each.node == node and each.host), str(node))
