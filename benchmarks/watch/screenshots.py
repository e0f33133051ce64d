"""Screenshots of the page and of the terminal view of a simulated run, for the documentation."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common import browser
from benchmarks.watch import page as pages
from benchmarks.watch.simulated_run import SimulatedSource
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import picture
from phalanx.watch.screen.view import View

# Waits until everything is drawn: what scrolls into view is reported one frame later, and drawn in the next.
_FRAMES = """new Promise(done => {
    let left = 10;
    const frame = () => left-- ? requestAnimationFrame(frame) : done();
    frame();
})"""


@dataclass(frozen=True)
class Screenshot:
    """One image of the page, when the simulated run (watch/model/simulation.py) is `second` seconds old."""

    name: str
    ranks: int
    second: int
    width: int = 1440
    height: int = 1000
    scale: float = 1.0
    dark: bool = False
    phone: bool = False
    keys: str = ""  # to press first
    part: str = ""  # a selector; otherwise the viewport


SCREENSHOTS = (
    Screenshot("page.png", 16, 90),
    Screenshot("page-dark.png", 16, 46, dark=True),
    Screenshot("phone.png", 8, 46, width=390, height=844, scale=1.5, phone=True),
    Screenshot("timeline.png", 16, 60, part="#timeline"),
)


def take(folder: str, inherited: Mapping[str, str]) -> int:
    """Write all images to `folder`."""
    os.makedirs(folder, exist_ok=True)
    asyncio.run(_screen(os.path.join(folder, "screen.svg")))
    asyncio.run(_pages(folder, inherited))
    return 0


async def _screen(file: str) -> None:
    ranks, second, start = 16, 46, 1.7e9
    model, view = RunModel(), View(able=True, rank=2)
    for event in simulation.begin(ranks, now=start):
        model.apply(event)
    for number in range(second):
        for event in simulation.second(number, ranks, now=start + 2 + number):
            model.apply(event)
    view.tail.switch(view.rank, view.stream)
    await view.tail.read(SimulatedSource(ranks, second, live=False))
    with open(file, "w") as output:
        output.write(picture.svg(model, view))
    _report(file)


async def _pages(folder: str, inherited: Mapping[str, str]) -> None:
    async with browser.launched() as chromium:
        for each in SCREENSHOTS:
            async with pages.served(each.ranks, each.second, inherited, live=False) as link:
                page = await chromium.new_page(
                    viewport={"width": each.width, "height": each.height},
                    device_scale_factor=each.scale,
                    is_mobile=each.phone,
                    has_touch=each.phone,
                    color_scheme="dark" if each.dark else "light",
                    reduced_motion="reduce",
                )
                await page.goto(link)
                await browser.wait_for(page, pages.PAINTED)
                for key in each.keys:
                    await page.keyboard.press(key)
                file = os.path.join(folder, each.name)
                if each.part:  # what is outside of the viewport is not drawn
                    await page.locator(each.part).scroll_into_view_if_needed()
                await page.evaluate(_FRAMES)
                await (page.locator(each.part) if each.part else page).screenshot(path=file)
                await page.close()
            _report(file)


def _report(file: str) -> None:
    sys.stderr.write(f"{file}: {os.path.getsize(file) / 1000:.0f} kB\n")
