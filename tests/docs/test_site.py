"""The site of `make docs`, opened from disk in a real browser: pages, pictures and search, without a network."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import browser

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("browser")]
ROOT = Path(__file__).parents[2]

BROKEN = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_opens_from_disk_and_the_search_finds(site: Path) -> None:
    asyncio.run(_look(site))


async def _look(site: Path) -> None:
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 25
    async with browser.launched() as chromium:
        page = await chromium.new_page()
        errors = browser.collect_errors(page)
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        for path in pages:
            await page.goto(path.as_uri())
            assert await page.evaluate(BROKEN) == [], path
            assert await page.evaluate("document.querySelector('h1') !== null"), path
        await page.goto((site / "index.html").as_uri())
        await page.keyboard.press("s")
        await browser.wait_for(page, "document.activeElement.name === 'query'")
        await page.keyboard.type("stall-timeout")
        await browser.wait_for(page, "document.querySelectorAll('.md-search-result__item').length > 0")
        found = await page.evaluate("document.querySelector('.md-search-result__list').innerText")
        assert "Hangs and verdicts" in found
        assert [url for url in requested if not url.startswith(("file://", "data:", "blob:"))] == []
        assert errors == []
