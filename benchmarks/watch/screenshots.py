"""Screenshots for the documentation: page and terminal view of a simulated run, and `phalanx ui` with real ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.common import browser
from benchmarks.common.paths import ROOT
from benchmarks.watch import page as pages
from benchmarks.watch.simulated_run import SimulatedSource
from benchmarks.watch.viewers import page_link
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import picture
from phalanx.watch.screen.view import View

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

_COLOURS = 200  # of a PNG: charts and text need no more, and the file is a third as large

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


# Real runs of `phalanx ui`: name, and arguments of examples/digits.py. The last one fails.
RUNS = {
    "baseline": ("--epochs", "3"),
    "longer": ("--epochs", "6"),
    "strict": ("--epochs", "1", "--at-least", "100"),
}


def take(folder: str, inherited: Mapping[str, str]) -> int:
    """Write all images to `folder`."""
    os.makedirs(folder, exist_ok=True)
    asyncio.run(_screen(os.path.join(folder, "screen.svg")))
    asyncio.run(_pages(folder, inherited))
    asyncio.run(_runs(folder, inherited))
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


async def _runs(folder: str, inherited: Mapping[str, str]) -> None:
    """Train for real, and take pictures of the list of runs, a comparison, and one of the runs."""
    with tempfile.TemporaryDirectory(prefix="phalanx-screenshots-") as home:
        variables = {**inherited, "PHALANX_HOME": home}
        for name, words in RUNS.items():
            line = [sys.executable, "-P", "-m", "phalanx", "run", "-g", "2", "--name", name, "digits.py", *words]
            sys.stderr.write(f"{name}: digits.py {' '.join(words)}\n")
            await asyncio.to_thread(
                subprocess.run,
                line,
                env=variables,
                cwd=os.path.join(ROOT, "examples"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        async with _listed(variables) as link, browser.launched() as chromium:
            await _runs_pictures(folder, chromium, link)


@contextlib.asynccontextmanager
async def _listed(variables: Mapping[str, str]) -> AsyncIterator[str]:
    """Serve `phalanx ui`; yield its link."""
    line = [sys.executable, "-P", "-m", "phalanx", "ui", "--page-at", "127.0.0.1:0"]
    process = subprocess.Popen(line, env=dict(variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        address, key = await asyncio.to_thread(page_link, process)
        yield f"http://{address}/#{key}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        if process.stdout is not None:
            process.stdout.close()


async def _runs_pictures(folder: str, chromium: Browser, link: str) -> None:
    page = await chromium.new_page(viewport={"width": 1280, "height": 860}, reduced_motion="reduce")
    await page.goto(link)
    await browser.wait_for(page, f"document.querySelectorAll('#rows tr').length === {len(RUNS)}")
    for name in ("baseline", "longer"):
        await page.click(f"#rows tr:has-text('{name}') input")
    await page.click("#compare")
    await browser.wait_for(page, "document.querySelectorAll('#charts figure').length > 3")
    await page.evaluate("scrollTo(0, 0)")
    await _shoot(page, os.path.join(folder, "runs.png"))
    await page.click("#rows a:text-is('longer')")
    await browser.wait_for(page, pages.PAINTED)
    await _shoot(page, os.path.join(folder, "run.png"))
    await page.close()


async def _shoot(page: Page, file: str) -> None:
    await page.evaluate(_FRAMES)
    await page.screenshot(path=file)
    _report(file)


def _shrink(file: str) -> None:
    """Make a PNG smaller, if Pillow is there: matplotlib needs it."""
    with contextlib.suppress(ImportError):
        from PIL import Image

        with Image.open(file) as image:
            fewer = image.convert("RGB").quantize(_COLOURS)
        fewer.save(file, optimize=True)


def _report(file: str) -> None:
    if file.endswith(".png"):
        _shrink(file)
    sys.stderr.write(f"{file}: {os.path.getsize(file) / 1000:.0f} kB\n")
