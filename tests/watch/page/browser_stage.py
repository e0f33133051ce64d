"""One Chromium for the tests of a file, and helpers to read a page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
import pytest
from playwright.async_api import Browser, Page

from benchmarks.common import browser
from benchmarks.common.browser import wait_for


class Stage:
    """One browser, and the loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, chromium: Browser) -> None:
        self.chromium = chromium
        self._runner = runner

    def run(self, act: Coroutine[Any, Any, None]) -> None:
        self._runner.run(act)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with asyncio.Runner() as runner:
        life = contextlib.AsyncExitStack()
        chromium = runner.run(life.enter_async_context(browser.launched()))
        try:
            yield Stage(runner, chromium)
        finally:
            runner.run(life.aclose())


def row(rank: int, column: str) -> str:
    return f"document.querySelector('#rank-{rank} > .{column}').textContent"


async def is_(page: Page, what: str, wanted: object) -> None:
    """Wait until the page shows the value: it receives it a moment later."""
    await wait_for(page, f"({what}) === {msgspec.json.encode(wanted).decode()}")
