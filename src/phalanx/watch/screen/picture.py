"""The screen as an SVG picture, for the documentation.

model = RunModel()
for event in simulation.run(8, 45):
    model.apply(event)
Path("screen.svg").write_text(picture.svg(model))
"""

from __future__ import annotations

import io
import re

from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import frame
from phalanx.watch.screen.signs import UNICODE
from phalanx.watch.screen.terminal.canvas import Canvas
from phalanx.watch.screen.view import View

_STYLES = {
    "bold": "bold",
    "dim": "dim",
    "chosen": "reverse",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "info": "cyan",
    "odd": "magenta",
    "data": "yellow",
    "compute": "green",
    "wait": "blue",
    "curve": "cyan",
}
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # fetched from the network: use a local font instead


def svg(
    model: RunModel, view: View | None = None, *, columns: int = 110, rows: int = 34, title: str = "phalanx"
) -> str:
    """Return the screen as SVG."""
    from rich.console import Console
    from rich.text import Text

    lines = frame.draw(model, view or View(able=True), Canvas(columns, rows, UNICODE), model.now)
    console = Console(record=True, width=columns, height=rows, file=io.StringIO(), force_terminal=True)
    for line in lines:
        styled = ((piece, " ".join(_STYLES.get(name, "") for name in named.split())) for piece, named in line)
        console.print(Text.assemble(*styled, no_wrap=True, overflow="crop"), end="\n")
    return _FONT.sub("", console.export_svg(title=title))
