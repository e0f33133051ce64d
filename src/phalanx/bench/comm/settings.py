"""What is measured, and for how long: options that the verb and the script in the ranks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.bench.comm import traffic
from phalanx.bench.comm.traffic import DTYPES, KIB, MIB, OPERATIONS
from phalanx.bench.launch import chosen
from phalanx.errors import OptionError

PARTS = {
    "calls": "every operation at every size",
    "pairs": "from each rank to each other one",
    "ddp": "training steps of a model that mostly communicates (shm beside gloo)",
}
SIZES = (KIB, 64 * KIB, MIB, 25 * MIB)  # larger ones take longer than all others together
QUICK_SIZES = (KIB, 64 * KIB, MIB)


@dataclass(frozen=True)
class Settings:
    backends: tuple[str, ...]
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    parts: tuple[str, ...]
    in_place: bool
    rounds: int
    seconds: float  # of a round of one operation and backend


def add(parser: argparse.ArgumentParser, backends: str) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument("--backends", default="", metavar="A,B", help=f"side by side, in one run ({backends})")
    names = ", ".join(OPERATIONS)
    group.add_argument("--operations", default="", metavar="A,B", help=f"of {names} (all)")
    group.add_argument("--sizes", default="", metavar="A,B", help="such as 1K,64K,25M (1K,64K,1M,25M)")
    group.add_argument("-b", "--begin", default="", metavar="SIZE", help="or from this size on, as nccl-tests (1K)")
    group.add_argument("-e", "--end", default="", metavar="SIZE", help="up to that one (256M)")
    group.add_argument("-f", "--factor", type=int, default=0, metavar="N", help="each so many times the last one (4)")
    group.add_argument("--dtypes", default="float32", metavar="A,B", help=f"of {', '.join(DTYPES)} (float32)")
    group.add_argument("--in-place", action="store_true", help="in place too, where torch has both ways")
    parts = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    group.add_argument("--only", default="", metavar="A,B", help=f"of {parts} (all that can be)")
    group.add_argument("--rounds", type=int, default=0, metavar="N", help="medians are of so many (5)")
    group.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="a round of one call takes so long (0.03)"
    )
    group.add_argument("--quick", action="store_true", help="up to 1 MiB, and a third of the time")


def read(options: argparse.Namespace, backends: Sequence[str]) -> Settings:
    """OptionError for what cannot be."""
    rounds = options.rounds or (3 if options.quick else 5)
    seconds = options.seconds or (0.01 if options.quick else 0.03)
    if rounds < 1 or seconds <= 0:
        raise OptionError("too little to tell anything", fix="--rounds 5 --seconds 0.03")
    if options.backends and not all(options.backends.split(",")):
        raise OptionError(f'--backends "{options.backends}" has one without a name', fix="--backends shm,gloo")
    return Settings(
        backends=tuple(dict.fromkeys(options.backends.split(","))) if options.backends else tuple(backends),
        operations=chosen("--operations", options.operations or ",".join(OPERATIONS), OPERATIONS),
        sizes=_sizes(options),
        dtypes=chosen("--dtypes", options.dtypes, DTYPES),
        parts=chosen("--only", options.only or ",".join(PARTS), PARTS),
        in_place=options.in_place,
        rounds=rounds,
        seconds=seconds,
    )


def words(settings: Settings) -> list[str]:
    """The same as a command line."""
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
    ladder = options.begin or options.end or options.factor
    if ladder and options.sizes:
        raise OptionError("--sizes is a list of them, -b, -e and -f make one", fix="leave one of both out")
    if not ladder:
        if options.sizes:
            return tuple(sorted({_size("--sizes", text) for text in options.sizes.split(",")}))
        return QUICK_SIZES if options.quick else SIZES
    begin = _size("-b", options.begin or "1K")
    end = _size("-e", options.end or ("1M" if options.quick else "256M"))
    factor = options.factor or 4
    if factor < 2 or end < begin:
        raise OptionError(
            f"no sizes from {traffic.write_size(begin)} to {traffic.write_size(end)}, each {factor} times the last",
            fix="-b 1K -e 256M -f 4",
        )
    return traffic.ladder(begin, end, factor)


def _size(option: str, text: str) -> int:
    try:
        return traffic.read_size(text)
    except ValueError:
        raise OptionError(
            f'{option}: "{text}" is no size', details=["expected bytes, or 64K, 25M, 1G"], fix=f"{option} 64K"
        ) from None
