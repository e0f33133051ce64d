"""`phalanx tour`: shows every collective on real ranks, and checks the results."""

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

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
MOST = len(COLORS)
# The ranks run in another process: this one does not import torch.
_RANKS = ("-P", "-m", "phalanx.demo.tour")


def main(argv: list[str]) -> int:
    """Run `phalanx tour`. Return the exit code."""
    options = make_parser().parse_args(argv)
    chosen = _chosen(options.names)
    if options.list:
        width = max(map(len, scenes.NAMES)) + 2
        sys.stdout.write("".join(f"{scene.name:<{width}}{scene.title}\n" for scene in chosen))
        return 0
    if not 2 <= options.ranks <= MOST:
        raise OptionError(f"--ranks {options.ranks}: the tour takes 2 to {MOST}", fix="phalanx tour --ranks 4")
    return _tour(chosen, options.ranks)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx tour`."""
    parser = argparse.ArgumentParser(
        prog="phalanx tour",
        description="Show every collective: what each rank has before the call, the call, and what it has after.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to show (default: everything): see --list")
    parser.add_argument(
        "-g", "--ranks", "--slots", type=int, default=4, metavar="N", help=f"number of ranks, 2 to {MOST} (default: 4)"
    )
    parser.add_argument("--list", action="store_true", help="list what the tour shows")
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
        return code  # the ranks have printed the reason
    results = json.loads(text)
    wrong: list[str] = []
    for place, scene in enumerate(chosen):
        shown = [ranks[place] for ranks in results]
        before, after = _moments([rank["before"] for rank in shown], [rank["after"] for rank in shown], scene)
        _show(console, scene, shown[0]["code"], before, after)
        wrong += [f"{scene.name}: rank {rank} {fault}" for rank, fault in scenes.faults(scene, before, after)]
    if wrong:
        raise LaunchError("the values of the ranks differ from the diagram", details=wrong)
    seconds = max(sum(scene["seconds"] for scene in rank) for rank in results)
    console.print(f"\n{len(chosen)} of {len(chosen)} as shown; {seconds:.2f} s of calls on {world} ranks")
    return 0


def _perform(words: Sequence[str]) -> tuple[int, bytes]:
    """Run the ranks in their own session: Ctrl-C ends this process, which then ends the ranks."""
    process = subprocess.Popen([sys.executable, *_RANKS, *words], stdout=subprocess.PIPE, start_new_session=True)
    try:
        text, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()  # the pipe closes when the last rank ends
    return (128 - process.returncode if process.returncode < 0 else process.returncode), text


def _moments(before: list[Any], after: list[Any], scene: TourScene) -> tuple[list[list[Any]], list[list[Any]]]:
    """Convert times to milliseconds since the first one."""
    if scene.unit != "ms":
        return before, after
    first = min(row[0] for row in before)
    return [[_ms(row[0] - first)] for row in before], [[_ms(row[0] - first)] for row in after]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


# -- diagram


class TourMarks(NamedTuple):
    """Characters that some terminals cannot show."""

    arrow: str = "→"
    nothing: str = "·"


def _marks(console: Console) -> TourMarks:
    """Return the characters that this terminal or pipe can show."""
    try:
        "".join(TourMarks()).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return TourMarks("->", ".")
    return TourMarks()


def _legend(console: Console, world: int) -> Text:
    from rich.text import Text

    text = Text(f"Values from rank 1 start with 1; {_marks(console).nothing} is empty or undefined.")
    if console.color_system is not None:
        text.append("\nColors:")
        for rank in range(world):
            text.append(f" {rank}", style=f"bold {COLORS[rank]}")
        text.append(", several ranks ")
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
        console.print(Text.assemble("  rank ", (str(rank), COLORS[rank]), " ", left, gap, f"  {marks.arrow}  ", right))


def _row(values: Sequence[Any], row: TourRow, marks: TourMarks, scene: TourScene, rank: int) -> Text:
    """Return the values that a rank held, in the colors of the diagram."""
    from rich.text import Text

    text = Text()
    if scene.unit:
        return text.append(f"{values[0]:4} {scene.unit}", style=COLORS[rank])
    if not values:
        return text.append(f"   {marks.nothing}")
    for place, value in enumerate(values):
        cell = row[place] if place < len(row) else TourCell("?")
        if cell is None:
            text.append(f"   {marks.nothing}")  # undefined in torch
        elif cell.origin is None:
            text.append(" ")
            text.append(f"{value:>3}", style="bold reverse")
        else:
            text.append(f"{value:>4}", style=COLORS[cell.origin])
    return text
