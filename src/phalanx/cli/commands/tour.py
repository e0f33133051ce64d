"""`phalanx tour`: every collective seen happening, on real ranks, and checked."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.demo import scenes
from phalanx.demo.scenes import TourCell, TourRow, TourScene
from phalanx.errors import LaunchError, OptionError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
MOST = len(COLOURS)
# Ranks and torch are in a process of its own, and never in the one that shows.
_RANKS = ("-P", "-m", "phalanx.demo.tour")


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    chosen = _chosen(options.names)
    if options.list:
        width = max(map(len, scenes.NAMES)) + 2
        sys.stdout.write("".join(f"{scene.name:<{width}}{scene.title}\n" for scene in chosen))
        return 0
    if not 2 <= options.ranks <= MOST:
        raise OptionError(f"--ranks {options.ranks}: the tour takes 2 to {MOST}", fix="phalanx tour --ranks 4")
    return _tour(chosen, options.ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx tour",
        description="See every collective happen: what each rank held before, the call, what it holds after.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to show (everything): see --list")
    parser.add_argument("-g", "--ranks", "--slots", type=int, default=4, metavar="N", help=f"ranks, 2 to {MOST} (4)")
    parser.add_argument("--list", action="store_true", help="what there is to see")
    return parser


def _chosen(names: Sequence[str]) -> tuple[TourScene, ...]:
    for name in names:
        if name not in scenes.NAMES:
            import difflib

            near = difflib.get_close_matches(name, scenes.NAMES, n=1)
            fix = f"phalanx tour {near[0]}" if near else "phalanx tour --list"
            raise OptionError(f"the tour does not show {name}", details=[", ".join(scenes.NAMES)], fix=fix)
    return tuple(scene for scene in scenes.SCENES if not names or scene.name in names)


def _tour(chosen: Sequence[TourScene], world: int) -> int:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(_legend(console, world))
    names = [scene.name for scene in chosen]
    code, text = _perform([str(world), *names])
    if code:
        return code  # it has said why
    played = json.loads(text)
    wrong: list[str] = []
    for place, scene in enumerate(chosen):
        told = [ranks[place] for ranks in played]
        before, after = _moments([rank["before"] for rank in told], [rank["after"] for rank in told], scene)
        _show(console, scene, told[0]["code"], before, after)
        wrong += [f"{scene.name}: rank {rank} {fault}" for rank, fault in scenes.faults(scene, before, after)]
    if wrong:
        raise LaunchError("what ranks hold is not what the picture says", details=wrong)
    seconds = max(sum(scene["seconds"] for scene in rank) for rank in played)
    console.print(f"\n{len(chosen)} of {len(chosen)} as the picture says; {seconds:.2f} s of calls on {world} ranks")
    return 0


def _perform(words: Sequence[str]) -> tuple[int, bytes]:
    """In a session of its own: a key that ends this process is not for the ranks, which are ended from here."""
    process = subprocess.Popen([sys.executable, *_RANKS, *words], stdout=subprocess.PIPE, start_new_session=True)
    try:
        text, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()  # the pipe is at its end when the last of them is gone
        raise
    return (128 - process.returncode if process.returncode < 0 else process.returncode), text


def _moments(before: list[Any], after: list[Any], scene: TourScene) -> tuple[list[list[Any]], list[list[Any]]]:
    """Moments on a clock, as milliseconds since the first."""
    if scene.unit != "ms":
        return before, after
    first = min(row[0] for row in before)
    return [[_ms(row[0] - first)] for row in before], [[_ms(row[0] - first)] for row in after]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


# -- the picture


class Marks(NamedTuple):
    arrow: str = "→"
    nothing: str = "·"


def _marks(console: Console) -> Marks:
    """What this terminal or pipe can show."""
    try:
        "".join(Marks()).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return Marks("->", ".")
    return Marks()


def _legend(console: Console, world: int) -> Text:
    from rich.text import Text

    text = Text(f"What came from rank 1 begins with 1; {_marks(console).nothing} is nothing, or nothing to rely on.")
    if console.color_system is not None:
        text.append("\nColours:")
        for rank in range(world):
            text.append(f" {rank}", style=f"bold {COLOURS[rank]}")
        text.append(", of several ")
        text.append(" 42", style="bold reverse")
    return text


def _show(console: Console, scene: TourScene, code: str, before: list[list[Any]], after: list[list[Any]]) -> None:
    from rich.text import Text

    world, marks = len(before), _marks(console)
    console.print()
    console.print(Text.assemble((scene.name, "bold"), f"  {scene.title}"))
    for line in code.splitlines():
        console.print(Text(f"    {line}", style="italic"))
    lefts = [_row(before[rank], scene.before(rank, world), marks, scene, rank) for rank in range(world)]
    rights = [_row(after[rank], scenes.expected(scene, rank, world), marks, scene, rank) for rank in range(world)]
    wide = max(len(left) for left in lefts)
    for rank, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        gap = " " * (wide - len(left))
        console.print(Text.assemble("  rank ", (str(rank), COLOURS[rank]), " ", left, gap, f"  {marks.arrow}  ", right))


def _row(values: Sequence[Any], row: TourRow, marks: Marks, scene: TourScene, rank: int) -> Text:
    """What a rank really held; the colours are the picture's."""
    from rich.text import Text

    text = Text()
    if scene.unit:
        return text.append(f"{values[0]:4} {scene.unit}", style=COLOURS[rank])
    if not values:
        return text.append(f"   {marks.nothing}")
    for place, value in enumerate(values):
        cell = row[place] if place < len(row) else TourCell("?")
        if cell is None:
            text.append(f"   {marks.nothing}")  # torch leaves open what is there
        elif cell.origin is None:
            text.append(" ")
            text.append(f"{value:>3}", style="bold reverse")
        else:
            text.append(f"{value:>4}", style=COLOURS[cell.origin])
    return text
