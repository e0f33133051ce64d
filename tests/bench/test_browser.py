"""Chromium under Playwright: no process or file is left. The page tests use it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from playwright.async_api import Error

from benchmarks.common import browser
from benchmarks.common.browser import BrowserError
from benchmarks.common.paths import ROOT
from tests.kit.cli import descendants, until
from tests.kit.proc import alive

pytestmark = pytest.mark.xdist_group("browser")


def test_it_ends_with_the_block_whatever_happens_there() -> None:
    async def broken() -> None:
        async with browser.launched() as chromium:
            page = await chromium.new_page()
            errors = browser.collect_errors(page)
            await page.goto("data:text/html,<h1>hello</h1><script>throw Error('broken')</script>")
            assert await page.evaluate("Promise.resolve(document.querySelector('h1').innerText)") == "hello"
            assert "broken" in errors[0]
            pids.update(descendants(os.getpid()))
            await page.evaluate("nothing.of.that")

    earlier = descendants(os.getpid())  # processes that another test in this process started
    pids: set[int] = set()
    with pytest.raises(Error, match="nothing is not defined"):
        asyncio.run(broken())
    pids.difference_update(earlier)
    assert len(pids) > 2  # the driver, and the processes of Chromium
    until(lambda: not any(map(alive, pids)))
    assert os.listdir(tempfile.gettempdir()) == []


def test_what_does_not_become_true_is_reported_with_the_text_of_the_page() -> None:
    async def look() -> None:
        async with browser.launched() as chromium:
            page = await chromium.new_page()
            await page.set_content("<h1>hello</h1>")
            assert await browser.wait_for(page, "document.querySelector('h1').innerText") == "hello"
            await browser.wait_for(page, "document.querySelector('h2').innerText", timeout=0.5)

    with pytest.raises(BrowserError, match=r"h2.*\n  hello"):
        asyncio.run(look())


def test_it_does_not_outlive_a_killed_parent() -> None:
    code = """if True:
        import asyncio
        from benchmarks.common import browser
        async def main():
            async with browser.launched() as chromium:
                print("launched", flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "TMPDIR": folder}
        ) as job,
    ):
        assert job.stdout is not None
        assert job.stdout.readline() == b"launched\n"
        pids = descendants(job.pid)
        assert len(pids) > 2
        os.kill(job.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, pids)), 20)


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BrowserError, match="Chromium is not installed") as raised:
        browser.find_chromium()
    assert raised.value.fix == "apt-get install chromium"
