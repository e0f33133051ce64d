"""A headless Chromium of this machine, driven by Playwright: for tests, measurements and screenshots.

async with browser.launched() as chromium:
    page = await chromium.new_page()
    errors = browser.collect_errors(page)
    await page.goto("http://127.0.0.1:29580/#KEY")
    await browser.wait_for(page, "document.querySelectorAll('.rank').length == 4")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Frame, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class BrowserError(LaunchError):
    """There is no usable browser, or a page does not reach the expected state."""


def find_chromium() -> str:
    """Return the path of the Chromium of this machine; BrowserError if there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise BrowserError(
        "Chromium is not installed", details=[f"looked for: {', '.join(NAMES)}"], fix="apt-get install chromium"
    )


@contextlib.asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """Launch Chromium with a new profile; both are removed after the block."""
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        raise BrowserError("Playwright is not installed", fix="pip install -e '.[bench]'") from None
    path = find_chromium()
    with tempfile.TemporaryDirectory(prefix="phalanx-browser-", ignore_cleanup_errors=True) as folder:
        variables = {**environment(), "HOME": folder, "TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
        async with async_playwright() as playwright:
            # Chromium refuses to run as root with its sandbox.
            chromium = await playwright.chromium.launch(
                executable_path=path, env={**variables}, chromium_sandbox=os.geteuid() != 0
            )
            try:
                yield chromium
            finally:
                await chromium.close()


def collect_errors(page: Page, into: list[str] | None = None) -> list[str]:
    """Return a list (`into`, or a new one) that receives the exceptions and console errors of a page from now on."""
    errors = [] if into is None else into

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(f"{message.text} {message.location['url']}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors


async def wait_for(page: Page | Frame, expression: str, *, timeout: float = 60.0) -> Any:
    """Wait until a JavaScript expression is true, and return its value. An exception in it counts as false."""
    from playwright.async_api import TimeoutError as PlaywrightTimeoutError

    predicate = f"() => {{ try {{ return {expression}; }} catch {{ return false; }} }}"
    try:
        handle = await page.wait_for_function(predicate, timeout=timeout * 1000)
    except PlaywrightTimeoutError:
        text = await page.evaluate("document.body ? document.body.innerText : ''")
        raise BrowserError(
            f"not true within {timeout:.0f} s: {expression}", details=str(text).splitlines()[:40]
        ) from None
    return await handle.json_value()
