"""The site of `make docs` in a real browser: pages, pictures and search, from disk and without a network."""

from __future__ import annotations

import asyncio
import functools
import html
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import phalanx
from benchmarks.common import browser

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("browser")]
ROOT = Path(__file__).parents[2]

PAGE = html.unescape((ROOT / "docs" / "troubleshooting.md").read_text())
TITLES = re.findall(r"^### (.+)$", PAGE, re.M)
BROKEN = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
EMPTY_HEADERS = "[...document.querySelectorAll('thead')].filter(it => it.offsetHeight && !it.innerText.trim()).length"


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
            assert await page.evaluate(EMPTY_HEADERS) == 0, path
        await page.goto((site / "index.html").as_uri())
        await _search(page, "stall-timeout", "Hangs and verdicts")
        await _letters_find(page)
        for message, title in messages().items():
            await _search(page, message, title)
        assert [url for url in requested if not url.startswith(("file://", "data:", "blob:"))] == []
        assert errors == []


def test_the_search_finds_a_message_on_a_server(site: Path) -> None:
    """On a server, the search runs in a worker instead of a frame."""
    asyncio.run(_ask_server(site))


async def _ask_server(site: Path) -> None:
    with _served(site) as address:
        async with browser.launched() as chromium:
            page = await chromium.new_page()
            await page.goto(f"{address}/index.html")
            await _search(page, *next(iter(messages().items())))


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_search_has_every_message(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {html.unescape(entry["title"]) for entry in index["docs"]}
    assert len(TITLES) >= 20
    assert [title for title in TITLES if title not in titles] == []


def test_the_reference_has_every_call_of_a_run(site: Path) -> None:
    """The page also has inherited calls and those of the process group, and shows arguments as lists."""
    page = (site / "reference" / "python.html").read_text()
    named = {f"phalanx.train.run.Run.{name}" for name in dir(phalanx.Run) if not name.startswith("_")}
    group = "phalanx.worker.process_group.group.WorkerProcessGroup"
    named |= {f"{group}.{name}" for name in ("barrier", "mean", "local_rank", "store", "on_resize", "close")}
    named.add("phalanx.train.model.wrapped.Wrapped.export")
    assert len(named) > 25
    assert [name for name in sorted(named) if f'id="{name}"' not in page] == []
    assert "<li><code>accumulate</code>: micro-batches per step" in page


def messages() -> dict[str, str]:
    """Return messages as users paste them, with characters that are special in lunr queries, and the expected title."""
    signs = (r"\w+: Expected to have", r".*: --local-rank", r"Exit code -9", r"\w+.OutOfMemoryError", r".* any network")
    lines = [line.removeprefix("- ").strip("`") for line in PAGE.splitlines()]
    found = {}
    for sign in signs:
        place = next(at for at, line in enumerate(lines) if re.match(rf"(### )?{sign}", line))
        title = next(line for line in reversed(lines[: place + 1]) if line.startswith("### "))
        found[lines[place].removeprefix("### ")] = title.removeprefix("### ")
    return found


async def _letters_find(page: Page) -> None:
    """A letter finds all words that begin with it. That fails if the word tree of the search has wrong branches."""
    for letter in "acdeprst":
        await _type(page, letter)
        meta = "document.querySelector('.md-search-result__meta').innerText"
        await browser.wait_for(page, f"/^[0-9]+ matching/.test({meta})")
        await page.keyboard.press("Escape")


async def _search(page: Page, text: str, expected: str) -> None:
    """Paste a text into the search, and wait until the first result has the expected title."""
    await _type(page, text)
    titles = "[...document.querySelector('.md-search-result__item').querySelectorAll('h1, h2')].slice(0, 2)"
    await browser.wait_for(page, f"{titles}.some(title => title.innerText.trim() === {json.dumps(expected)})")
    await page.keyboard.press("Escape")


async def _type(page: Page, text: str) -> None:
    await page.keyboard.press("s")
    await browser.wait_for(page, "document.activeElement.name === 'query'")
    await page.evaluate(
        "document.activeElement.value = ''; document.querySelector('.md-search-result__list').replaceChildren();"
        "document.querySelector('.md-search-result__meta').textContent = ''"
    )
    await page.keyboard.insert_text(text)
    await page.keyboard.press("End")  # the search starts when a key is released
