"""Pictures of real runs: page, terminal view, report and list of runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.common import browser, processes
from benchmarks.common.paths import ROOT, script
from benchmarks.common.processes import ProcessLostError
from benchmarks.watch.page import PAINTED
from benchmarks.watch.viewers import page_link
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.finished_run import FinishedRun
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import picture
from phalanx.watch.screen.view import View

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

PHALANX = (sys.executable, "-P", "-m", "phalanx")
RANKS, KILLED, STUCK = 8, 3, 5
TIMEOUT = 300.0  # seconds for anything
_LINK = re.compile(r"http://127\.0\.0\.1:\d+/#[\w-]+")
_STALLED = "!document.getElementById('verdicts').hidden"

# Waits until everything is drawn: what scrolls into view is reported one frame later, and drawn in the next.
_FRAMES = """new Promise(done => {
    let left = 10;
    const frame = () => left-- ? requestAnimationFrame(frame) : done();
    frame();
})"""

# Short runs for the list of runs: name, and arguments of examples/digits.py. The last one fails.
RUNS = {
    "baseline": ("--epochs", "3"),
    "longer": ("--epochs", "6"),
    "strict": ("--epochs", "1", "--at-least", "100"),
}


async def take(folder: str, home: str, inherited: Mapping[str, str]) -> None:
    """Write all pictures to `folder`. Runs are kept in `home`."""
    variables = {**inherited, "PHALANX_HOME": home}
    async with browser.launched() as chromium:
        await _live(folder, home, variables, chromium)
        await _report(folder, home, variables, chromium)
        await _list(folder, variables, chromium)


async def _live(folder: str, home: str, variables: Mapping[str, str], chromium: Browser) -> None:
    """Picture a run in which rank 3 is killed, and rank 5 is stuck later."""
    shutil.copy(script("pictured.py"), os.path.join(home, "train.py"))  # pictures show no path of this machine
    command = [*PHALANX, "run", "-g", str(RANKS), "--cpu", "--name", "waves", "--stall-timeout", "3"]
    command += ["--page-at", "127.0.0.1:0", "train.py", "--epochs", "24", "--kill", str(KILLED), "40"]
    process = processes.start_logged([*command, "--stuck", str(STUCK), "200", "16"], variables, home)
    run = os.path.join(home, "runs", "waves")
    try:
        output = os.path.join(home, processes.OUTPUT)
        link = await _until("a link", process, lambda: _LINK.search(_text(output)))
        dark = await _open(chromium, link[0], dark=True)
        light = await _open(chromium, link[0])
        phone = await _open(chromium, link[0], width=390, height=844, phone=True)
        await browser.wait_for(dark, _STALLED, timeout=TIMEOUT)
        bottom = await dark.evaluate("document.getElementById('verdicts').getBoundingClientRect().bottom")
        await dark.screenshot(
            path=os.path.join(folder, "page-dark.png"),
            clip={"x": 0, "y": 0, "width": 1440, "height": bottom + 12},  # below are stacks, with paths of this machine
        )
        await _terminal(os.path.join(folder, "screen.svg"), home)
        await _until("the end of the stall", process, lambda: '"event":"resumed"' in _text(f"{run}/events.jsonl"))
        await asyncio.sleep(25)  # of training, to be seen behind the stall
        await _shoot(light, os.path.join(folder, "page.png"))
        await _shoot(light, os.path.join(folder, "timeline.png"), "#timeline")
        await _shoot(phone, os.path.join(folder, "phone.png"))
        for page in (dark, light, phone):
            await page.close()
        if not await asyncio.to_thread(processes.wait_for_exit, process, TIMEOUT):
            raise ProcessLostError(f"the run has not ended: {processes.last_output(home)}")
    finally:
        if process.poll() is None:
            processes.stop(process)


async def _terminal(file: str, home: str) -> None:
    (record,) = run_folder.all_runs(home)
    source, model, view = FinishedRun(record), RunModel(), View(able=True, rank=STUCK)
    async for event in source.events():
        model.apply(event)
    view.tail.switch(view.rank, view.stream)
    await view.tail.read(source)
    with open(file, "w") as output:
        output.write(picture.svg(model, view))
    _tell(file)


async def _report(folder: str, home: str, variables: Mapping[str, str], chromium: Browser) -> None:
    file = os.path.join(home, "waves.html")
    command = [*PHALANX, "report", "waves", "-o", file]
    await asyncio.to_thread(subprocess.run, command, env=variables, check=True, capture_output=True)
    page = await chromium.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    await page.goto(f"file://{file}")
    await page.evaluate("[...document.querySelectorAll('h2')].find(h => h.textContent == 'Speed').scrollIntoView()")
    await _shoot(page, os.path.join(folder, "report.png"))
    await page.close()


async def _list(folder: str, variables: Mapping[str, str], chromium: Browser) -> None:
    """Picture the list of runs, and a comparison of two of them."""
    for name, words in RUNS.items():
        await asyncio.to_thread(
            subprocess.run,
            [*PHALANX, "run", "-g", "2", "--cpu", "--name", name, "digits.py", *words],
            env=variables,
            cwd=os.path.join(ROOT, "examples"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    async with _served(variables) as link:
        page = await chromium.new_page(viewport={"width": 1280, "height": 860}, reduced_motion="reduce")
        await page.goto(link)
        await browser.wait_for(page, f"document.querySelectorAll('#rows tr').length === {len(RUNS) + 1}")
        for name in ("baseline", "longer"):
            await page.click(f"#rows tr:has-text('{name}') input")
        await page.click("#compare")
        await browser.wait_for(page, "document.querySelectorAll('#charts figure').length > 3")
        await page.evaluate("scrollTo(0, 0)")
        await _shoot(page, os.path.join(folder, "runs.png"))
        await page.close()


@contextlib.asynccontextmanager
async def _served(variables: Mapping[str, str]) -> AsyncIterator[str]:
    """Serve `phalanx ui`; yield its link."""
    line = [*PHALANX, "ui", "--page-at", "127.0.0.1:0"]
    process = subprocess.Popen(line, env=dict(variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        address, key = await asyncio.to_thread(page_link, process)
        yield f"http://{address}/#{key}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        if process.stdout is not None:
            process.stdout.close()


async def _open(
    chromium: Browser, link: str, *, width: int = 1440, height: int = 1000, dark: bool = False, phone: bool = False
) -> Page:
    page = await chromium.new_page(
        viewport={"width": width, "height": height},
        device_scale_factor=1.5 if phone else 1.0,
        is_mobile=phone,
        has_touch=phone,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    await page.goto(link)
    await browser.wait_for(page, PAINTED, timeout=TIMEOUT)
    return page


async def _shoot(page: Page, file: str, part: str = "") -> None:
    if part:  # what is outside of the viewport is not drawn
        await page.evaluate(f"document.querySelector('{part}').scrollIntoView()")
    await page.evaluate(_FRAMES)
    # `locator.screenshot` would first wait until the element stops moving, which can fail on a busy machine.
    await page.screenshot(path=file, clip=await page.locator(part).bounding_box() if part else None)
    _tell(file)


async def _until(what: str, process: subprocess.Popen[bytes], found: Callable[[], Any]) -> Any:
    """Wait until `found` returns something, and return it."""
    end = time.monotonic() + TIMEOUT
    while not (result := found()):
        if process.poll() is not None or time.monotonic() > end:
            raise ProcessLostError(f"waited for {what}, and the run has ended or does not get there")
        await asyncio.sleep(0.2)
    return result


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _tell(file: str) -> None:
    sys.stderr.write(f"{file}: {os.path.getsize(file) / 1000:.0f} kB\n")
