"""A real run of two nodes, seen in a browser."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page

from benchmarks.common import browser
from tests.e2e.places import script
from tests.kit import cli
from tests.kit.cli import Env, Handle, free_port, start

pytestmark = pytest.mark.xdist_group("browser")
LINK = re.compile(r"see (http://127\.0\.0\.1:\d+/#[\w-]+)\n")
# Red is shown for some seconds only: a slow machine may check too late.
REDS = """window.reds = new Set(); new MutationObserver(() => {
    for (const row of document.querySelectorAll('.row.rank[data-health=dead]'))
        reds.add(`${row.dataset.rank} ${row.querySelector('.health').textContent}`);
}).observe(document.getElementById('grid'), {subtree: true, attributes: true, attributeFilter: ['data-health']})"""
LIMIT = 90.0  # seconds, for a loaded machine


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    with cli.warm_environment("torch._dynamo") as env:
        yield env


def test_nodes_join_a_rank_is_stuck_and_another_dies(env: Env, tmp_path: Path) -> None:
    port = free_port()
    same = ("run", "-n", "2", "-g", "2,1", "--cpu", "--master", f"localhost:{port}", "--stall-timeout", "2")
    copy, commit = committed(script("seen.py"), tmp_path / "code")
    what = (copy, str(tmp_path))
    with start(*same, "-i", "0", "--page", *what, env=env) as one:
        (link,) = one.wait_for(LINK)
        asyncio.run(look(link[1], lambda: start(*same, "-i", "1", *what, env=env), tmp_path, one, commit))


def committed(file: str, folder: Path) -> tuple[str, str]:
    """A copy of a script in a repository, and the commit."""
    folder.mkdir()
    copy = shutil.copy(file, folder)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "one")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return str(copy), found.stdout.strip()


async def look(link: str, join: Callable[[], Handle], folder: Path, one: Handle, commit: str) -> None:
    async with browser.launched() as chromium:
        page = await chromium.new_page()
        errors = browser.collect_errors(page)
        await page.goto(link)
        await sees(page, "document.querySelector('#rendezvous .missing')?.textContent.includes('node 1')")
        with join() as other:
            await trains(page, one, other, folder)
            await sees(page, f"document.getElementById('about-line').textContent.includes('commit {commit[:7]} ')")
            (folder / "end").touch()
            await sees(page, "document.getElementById('notice').textContent.startsWith('The run succeeded.')")
            assert [one.wait(60), other.wait(60)] == [0, 0], one.both + other.both
            assert await page.evaluate("document.querySelectorAll('.row.rank:not([hidden])').length") == 3
            await ended(page)
            assert [error for error in errors if "net::" not in error] == []  # the server has ended


async def ended(page: Page) -> None:
    """Data that can no longer be fetched is named, with the command that shows it."""
    gone = "the run has ended, and the server of this page with it; in a terminal: phalanx"
    await page.click("#stderr")
    await sees(page, f"document.getElementById('log-note').textContent.includes('stderr: {gone} logs ')")
    await page.fill("#search-text", "made")
    await page.click("#search button")
    await sees(page, f"document.getElementById('found').textContent.startsWith('{gone} logs ')")
    await page.click("#why")
    await sees(page, f"document.getElementById('stacks-note').textContent.startsWith('no stacks: {gone} why ')")


async def trains(page: Page, one: Handle, other: Handle, folder: Path) -> None:
    # The second node has joined: all ranks exist and train.
    await sees(page, "document.getElementById('rendezvous').hidden")
    await sees(page, "document.querySelectorAll('.row.rank:not([hidden])').length === 3")
    healths = "[...document.querySelectorAll('.row.rank:not([hidden])')].map(one => one.dataset.health)"
    await sees(page, f"{healths}.every(health => !['starting', 'dead', 'stuck'].includes(health))")
    await sees(page, "Number(document.querySelector('#rank-2 .step').textContent.replace(/\\D/g, '')) > 5")
    await sees(page, "document.querySelector('#charts [data-curve=loss]')")
    # One rank is stuck: it is named, with all stacks; then it continues.
    (folder / "stuck").touch()
    await sees(page, "/rank 1\\b/.test(document.getElementById('verdicts').textContent)")
    await sees(page, "document.querySelector('#rank-1')?.dataset.health === 'stuck'")
    await sees(page, "document.querySelector('#stacks-list .named')?.textContent.includes('wait_for_data')")
    (folder / "stuck").unlink()
    await sees(page, "document.getElementById('verdicts').hidden")
    await sees(page, "document.querySelector('#event-list [data-kind=resumed]')")
    # Another rank is killed: it is red for a while, and a new one is started.
    await page.evaluate(REDS)
    (folder / "die").touch()
    await sees(page, "reds.has('2 ✕ dead')")
    await sees(page, "document.querySelector('#event-list [data-kind=fault]')?.textContent.includes('rank 2')")
    await sees(page, "document.querySelector('#event-list [data-kind=recovered]')")
    await sees(page, f"{healths}.length === 3 && !{healths}.includes('dead')")
    # Its output.
    await page.keyboard.press("g")
    await page.keyboard.press("l")
    await sees(page, "document.getElementById('log').textContent.includes('is made')")


async def sees(page: Page, what: str) -> None:
    await browser.wait_for(page, what, timeout=LIMIT)
