"""`python -m benchmarks.pictures docs/pictures`: draws all pictures of the documentation.

Page, terminal view, report, list of runs and recovery are of real runs, which take about three minutes. The plots show
the tables of docs/benchmarks.md. Needs Chromium and `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable

from benchmarks.common import processes
from benchmarks.common.paths import script
from benchmarks.common.processes import ProcessLostError
from benchmarks.pictures import plots, recovery, screenshots
from benchmarks.pictures.diagrams import DIAGRAMS
from phalanx.cluster.sources.surroundings import environment

_COLORS = 200  # of a PNG: charts and text need no more, and the file is a third as large


def draw_diagrams(folder: str) -> None:
    """Draw the diagrams of docs/concepts."""
    for name, draw in DIAGRAMS.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(draw())


def draw_plots(folder: str) -> None:
    """Draw the plots of docs/benchmarks.md."""
    plots.launch(os.path.join(folder, "launch.png"))
    plots.recover(os.path.join(folder, "recovery.png"))


def draw_recovery(folder: str) -> None:
    """Kill a rank of a real run, and draw its recovery."""
    with tempfile.TemporaryDirectory(prefix="phalanx-pictures-") as home:
        command = [*screenshots.PHALANX, "run", "-g", "4", "--cpu", "--name", "recovery", "--no-page"]
        command += [script("pictured.py"), "--epochs", "1", "--kill", "2", "60"]
        if problem := processes.run_logged(command, {**environment(), "PHALANX_HOME": home}, home):
            raise ProcessLostError(problem)
        recovery.draw(os.path.join(home, "runs", "recovery"), os.path.join(folder, "recovery-timeline.png"))


def draw_screenshots(folder: str) -> None:
    """Take pictures of real runs in a browser."""
    with tempfile.TemporaryDirectory(prefix="phalanx-pictures-") as home:
        asyncio.run(screenshots.take(folder, home, environment()))


PARTS: dict[str, Callable[[str], None]] = {
    "diagrams": draw_diagrams,
    "plots": draw_plots,
    "recovery": draw_recovery,
    "screenshots": draw_screenshots,
}


def shrink(folder: str) -> None:
    """Make PNGs smaller. matplotlib needs Pillow, so it is there."""
    from PIL import Image

    for name in os.listdir(folder):
        if name.endswith(".png"):
            path = os.path.join(folder, name)
            with Image.open(path) as image:
                if image.mode == "P":
                    continue
                fewer = image.convert("RGB").quantize(_COLORS)
            fewer.save(path, optimize=True)


def main() -> int:
    """Draw the pictures and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description="Draw the pictures of the docs.")
    parser.add_argument("folder", help="where to write them")
    parser.add_argument("--only", choices=PARTS, help="draw only these (default: all)")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    for name, draw in PARTS.items():
        if options.only in (None, name):
            sys.stderr.write(f"{name} …\n")
            draw(options.folder)
    shrink(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
