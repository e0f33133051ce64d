"""The driver of Chromium: what it is for is tested with the page; here, that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from benchmarks.common import browser
from benchmarks.common.browser import BrowserError
from tests.kit.cli import descendants, until
from tests.kit.proc import alive

pytestmark = pytest.mark.xdist_group("browser")


def test_it_ends_with_the_block_whatever_happens_there() -> None:
    async def broken() -> list[int]:
        async with browser.started() as chromium:
            page = await chromium.page("data:text/html,<h1>hello</h1><script>throw Error('told')</script>")
            assert await page.evaluate("Promise.resolve(document.querySelector('h1').innerText)") == "hello"
            assert "told" in page.errors[0]
            pids.extend([chromium.pid, *descendants(chromium.pid)])
            await page.evaluate("nothing.of.that")
        return pids

    pids: list[int] = []
    with pytest.raises(BrowserError, match="nothing is not defined"):
        asyncio.run(broken())
    until(lambda: not any(map(alive, pids)))
    assert os.listdir(tempfile.gettempdir()) == []


def test_it_does_not_outlive_whoever_was_killed() -> None:
    code = """if True:
        import asyncio, os
        from benchmarks.common import browser
        async def main():
            async with browser.started() as chromium:
                print(chromium.pid, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": folder}
        ) as job,
    ):
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        pids = [pid, *descendants(pid)]
        os.kill(job.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, pids)), 20)


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BrowserError, match="there is no Chromium") as told:
        browser.found()
    assert told.value.fix == "apt-get install chromium"
