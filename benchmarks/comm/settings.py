"""The settings of a measurement: options that `phalanx bench comm` and the script in the ranks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.comm import traffic
from benchmarks.comm.traffic import DTYPES, KIB, MIB, OPERATIONS
from benchmarks.common.options import choices
from phalanx.errors import OptionError

PARTS = {
    "calls": "every operation at every size",
    "pairs": "latency and bandwidth from each rank to every other",
    "ddp": "training steps of a model that mostly communicates (shm and gloo)",
}
SIZES = (KIB, 64 * KIB, MIB, 25 * MIB)  # larger sizes take longer than all others together
QUICK_SIZES = (KIB, 64 * KIB, MIB)


@dataclass(frozen=True)
class CommSettings:
    """What is measured, and how often."""

    backends: tuple[str, ...]
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    parts: tuple[str, ...]
    in_place: bool
    rounds: int
    seconds: float  # per round of one operation and backend


def add_arguments(parser: argparse.ArgumentParser, backends: str) -> None:
    """Add the options to a parser. `backends` describes the default of --backends."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--backends", default="", metavar="A,B", help=f"backends to compare ({backends})")
    names = ", ".join(OPERATIONS)
    group.add_argument("--operations", default="", metavar="A,B", help=f"operations: {names} (all)")
    group.add_argument("--sizes", default="", metavar="A,B", help="tensor sizes (1K,64K,1M,25M)")
    group.add_argument(
        "-b", "--begin", default="", metavar="SIZE", help="or the first size of a range, as in nccl-tests (1K)"
    )
    group.add_argument("-e", "--end", default="", metavar="SIZE", help="last size of the range (256M)")
    group.add_argument(
        "-f", "--factor", type=int, default=0, metavar="N", help="factor between two sizes of the range (4)"
    )
    group.add_argument("--dtypes", default="float32", metavar="A,B", help=f"data types: {', '.join(DTYPES)} (float32)")
    group.add_argument("--in-place", action="store_true", help="also in place, where torch supports both")
    parts = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    group.add_argument("--only", default="", metavar="A,B", help=f"parts: {parts} (all)")
    group.add_argument("--rounds", type=int, default=0, metavar="N", help="rounds (5)")
    group.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="seconds per round of one operation (0.03)"
    )
    group.add_argument("--quick", action="store_true", help="sizes up to 1 MiB, and a third of the time")


def parse(options: argparse.Namespace, backends: Sequence[str]) -> CommSettings:
    """Return the settings of parsed options; `backends` is the default. OptionError for invalid values."""
    rounds = options.rounds or (3 if options.quick else 5)
    seconds = options.seconds or (0.01 if options.quick else 0.03)
    if rounds < 1 or seconds <= 0:
        raise OptionError("--rounds and --seconds must be positive", fix="--rounds 5 --seconds 0.03")
    if options.backends and not all(options.backends.split(",")):
        raise OptionError(f'--backends "{options.backends}" has an empty name', fix="--backends shm,gloo")
    return CommSettings(
        backends=tuple(dict.fromkeys(options.backends.split(","))) if options.backends else tuple(backends),
        operations=choices("--operations", options.operations or ",".join(OPERATIONS), OPERATIONS),
        sizes=_sizes(options),
        dtypes=choices("--dtypes", options.dtypes, DTYPES),
        parts=choices("--only", options.only or ",".join(PARTS), PARTS),
        in_place=options.in_place,
        rounds=rounds,
        seconds=seconds,
    )


def to_arguments(settings: CommSettings) -> list[str]:
    """Return the settings as command-line arguments."""
    return [
        *("--backends", ",".join(settings.backends)),
        *("--operations", ",".join(settings.operations)),
        *("--sizes", ",".join(map(str, settings.sizes))),
        *("--dtypes", ",".join(settings.dtypes)),
        *("--only", ",".join(settings.parts)),
        *(["--in-place"] if settings.in_place else []),
        *("--rounds", str(settings.rounds), "--seconds", str(settings.seconds)),
    ]


def _sizes(options: argparse.Namespace) -> tuple[int, ...]:
    in_range = options.begin or options.end or options.factor
    if in_range and options.sizes:
        raise OptionError("--sizes cannot be combined with -b, -e and -f", fix="remove one of them")
    if not in_range:
        if options.sizes:
            return tuple(sorted({_size("--sizes", text) for text in options.sizes.split(",")}))
        return QUICK_SIZES if options.quick else SIZES
    begin = _size("-b", options.begin or "1K")
    end = _size("-e", options.end or ("1M" if options.quick else "256M"))
    factor = options.factor or 4
    if factor < 2 or end < begin:
        raise OptionError(
            f"no sizes from {traffic.format_size(begin)} to {traffic.format_size(end)}, each {factor} times the last",
            fix="-b 1K -e 256M -f 4",
        )
    return traffic.size_range(begin, end, factor)


def _size(option: str, text: str) -> int:
    try:
        return traffic.parse_size(text)
    except ValueError:
        raise OptionError(
            f'{option}: "{text}" is not a size', details=["expected bytes, or 64K, 25M, 1G"], fix=f"{option} 64K"
        ) from None
