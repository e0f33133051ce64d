"""Screenshots of the page and of the terminal view of a simulated run, for the documentation."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common import browser
from benchmarks.common.browser import Page
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
    async with browser.started() as chromium:
        for each in SCREENSHOTS:
            async with pages.served(each.ranks, each.second, inherited, live=False) as link:
                page = await chromium.page(width=each.width, height=each.height)
                await page.size(each.width, each.height, mobile=each.phone, scale=each.scale)
                await page.prefer(color_scheme="dark" if each.dark else "light", reduced_motion="reduce")
                await page.goto(link)
                await page.wait_for(pages.PAINTED)
                for key in each.keys:
                    await page.press(key)
                file = os.path.join(folder, each.name)
                await _shot(page, each.part, file)
                await page.close()
            _report(file)


async def _shot(page: Page, part: str, file: str) -> None:
    if part:  # what is outside of the viewport is not drawn
        await page.evaluate(
            f"document.querySelector('{part}').scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
    await page.evaluate(_FRAMES)
    if not part:
        return await page.screenshot(file)
    box = await page.evaluate(
        f"(() => {{ const box = document.querySelector('{part}').getBoundingClientRect();"
        " return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}; })()"
    )
    answer = await page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=box)
    with open(file, "wb") as output:
        output.write(base64.b64decode(answer["data"]))
    return None


def _report(file: str) -> None:
    sys.stderr.write(f"{file}: {os.path.getsize(file) / 1000:.0f} kB\n")
