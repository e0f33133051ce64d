"""`phalanx ui` in a real Chromium and by plain requests: the list of runs, their comparison, and deletion."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from playwright.async_api import Page

from benchmarks.common.browser import wait_for
from phalanx.contract import events
from phalanx.forkserver import linux
from phalanx.launcher.viewers.run_list import LocalRunList
from phalanx.watch.model import simulation
from phalanx.watch.page import address
from phalanx.watch.page.keys import PageKeys
from phalanx.watch.page.runs_server import RunsServer
from tests.kit.cli import start
from tests.watch.finished_run import home, left, record_at
from tests.watch.page.browser_stage import Stage, is_, stage
from tests.watch.page.fake_source import KEY, opened
from tests.watch.test_run_list import described

__all__ = ["stage"]
pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.leaves(
        "process:*chromium*", why="one browser for all of them, which keeps processes for the next page"
    ),
    pytest.mark.leaves("thread:asyncio_*", why="the loop of that browser, which outlives a test, reads files in them"),
]
EVIL = "<img src=x onerror='document.title=1'>"


@contextlib.asynccontextmanager
async def served(*, read_only: bool = False) -> AsyncIterator[str]:
    """Serve the list; yield the address without the key."""
    where = address.parse("127.0.0.1:0")
    sock = address.listen(where)
    runs = RunsServer(LocalRunList(str(home()), read_only=read_only), where, PageKeys(KEY, sock.getsockname()[1], "ui"))
    runner = web.ServerRunner(runs.gate, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        await runner.cleanup()
        await runs.end()


@contextlib.asynccontextmanager
async def looked_at(stage: Stage) -> AsyncIterator[Page]:
    errors: list[str] = []
    async with served() as link, opened(stage.chromium, f"{link}#{KEY}", errors=errors) as page:
        await wait_for(page, "!document.getElementById('view').hidden")
        yield page
        assert errors == []


NAMES = "[...document.querySelectorAll('#rows a')].map(one => one.textContent).join()"


def test_list_filter_compare_open_and_delete(stage: Stage, tmp_path: Path) -> None:
    described(left("first", simulation.run(2, 30)).folder)
    left("second", simulation.run(4, 40, code=1), code=1, ranks=4)
    left("third", simulation.run(2, 5), code=130)

    async def act() -> None:
        async with looked_at(stage) as page:
            await is_(page, f"{NAMES}.split(',').sort().join()", "first,second,third")
            cells = "[...document.querySelector('#rows a[href]').closest('tr').cells].map(one => one.textContent)"
            await page.fill("#filter", "lr=0.1 a1a1")
            await is_(page, NAMES, "first")
            shown = await page.evaluate(cells)
            assert shown[2] == "✓ done"
            assert shown[5:9] == ["2", "29", shown[7], "a1a1a1a*"]
            assert shown[-1] == "lr=0.1 amp=true note=none"
            await page.fill("#filter", "")
            await page.click("#kinds [data-kind=failed]")
            await is_(page, NAMES, "second")
            await page.click("#kinds [data-kind=failed]")
            # Sorted by the number of ranks.
            await page.click("#heads th:nth-child(6) button")
            await is_(page, f"{NAMES}.startsWith('second,')", True)
            # Two selected runs are drawn in one chart.
            assert await page.evaluate("document.getElementById('compare').disabled")
            for name in ("first", "second"):
                await page.click(f"tr:has-text('{name}') input")
            await page.click("#compare")
            await wait_for(page, "document.querySelectorAll('#charts figure').length >= 6")
            legend = "[...document.querySelectorAll('#legend li')].map(one => one.textContent).sort().join()"
            await is_(page, legend, "first,second")
            await wait_for(page, "document.querySelectorAll('#charts figure:first-child .value i').length === 2")
            facts = "[...document.querySelectorAll('#facts tr')].map(one => [...one.cells].map(x => x.textContent))"
            rows = {row[0]: row[1:] for row in await page.evaluate(facts)}
            assert sorted(rows["ranks"]) == ["2", "4"]
            assert sorted(rows["lr"]) == ["0.1", "–"]
            differs = "[...document.querySelectorAll('#facts .differs th')].map(one => one.textContent)"
            assert "lr" in await page.evaluate(differs)
            async with page.expect_download() as csv:
                await page.click("#save-csv")
            await (await csv.value).save_as(tmp_path / "curves.csv")
            lines = (tmp_path / "curves.csv").read_text().splitlines()
            assert lines[0] == "curve,run,step,seconds,value"
            assert {line.split(",")[1] for line in lines if line.startswith("loss,")} == {"first", "second"}
            # The run itself, and back.
            await page.click("tr:has-text('first') a")
            await is_(page, "document.getElementById('name')?.textContent", "train-simulated")
            await wait_for(page, "document.querySelectorAll('.row.rank').length >= 2")
            await page.click("#all-runs")
            await wait_for(page, "document.querySelectorAll('#rows tr').length === 3")
            # Deleted only after a confirmation.
            await page.click("tr:has-text('third') input")
            for answer in ("Cancel", "Delete"):
                await page.click("#delete")
                await page.click(f"#confirm button:text-is('{answer}')")
                if answer == "Cancel":
                    assert (home() / "runs" / "third").exists()
            await wait_for(page, "document.querySelectorAll('#rows tr').length === 2")
            assert not (home() / "runs" / "third").exists()

    stage.run(act())


def test_a_comparison_shows_how_a_live_run_ended(stage: Stage) -> None:
    left("first", simulation.run(2, 30))
    happened = list(simulation.run(2, 30))
    live = left("live", happened[:-1], code=None)
    pid = os.getpid()
    record_at(live, pid=pid, pid_started=linux.start_time(pid))
    state = "document.querySelector('#facts tbody tr').textContent"

    async def act() -> None:
        async with looked_at(stage) as page:
            for name in ("first", "live"):
                await page.click(f"tr:has-text('{name}') input")
            assert await page.evaluate("document.getElementById('delete').disabled")  # one of them is running
            await page.click("#compare")
            await wait_for(page, f"{state}.includes('running')")
            with open(f"{live.folder}/events.jsonl", "ab") as file:
                file.write(events.encode(happened[-1]))
            record_at(live, ended=happened[-1].time, code=0)
            await is_(page, state, "statedonedone")

    stage.run(act())


def test_two_hundred_runs_and_nothing_of_them_is_markup(stage: Stage) -> None:
    for number in range(199):
        left(f"run{number}", simulation.run(1, 2), ranks=1)
    record = left("evil", simulation.run(1, 2), ranks=1)
    path = Path(record.folder) / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": EVIL, "command": [EVIL]}))

    async def act() -> None:
        async with looked_at(stage) as page:
            await is_(page, "document.querySelectorAll('#rows tr').length", 200)
            assert await page.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
            await page.fill("#filter", "onerror")
            await is_(page, NAMES, EVIL)
            # Typing a letter costs a frame or two.
            await page.fill("#filter", "")
            spent = await page.evaluate(
                """(() => { const field = document.getElementById('filter'); return Math.min(
                ...['r', 'ru', 'run', 'run1', 'run', 'ru', 'r', ''].map(text => { const start = performance.now();
                field.value = text; field.dispatchEvent(new Event('input')); document.body.offsetHeight;
                return performance.now() - start; })); })()"""
            )
            assert spent < 100  # milliseconds, on a machine that is busy
            nameless = """[...document.querySelectorAll('button, input, a, [tabindex]')]
                .filter(one => one.checkVisibility() && !(one.ariaLabel || one.textContent.trim() || one.title))
                .map(one => one.outerHTML.slice(0, 80))"""
            assert await page.evaluate(nameless) == []

    stage.run(act())


def test_who_may_ask_and_delete() -> None:
    left("one", simulation.run(2, 5))
    left("two", simulation.run(2, 5))

    async def act() -> None:
        async with served() as link, aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            ours = {"Origin": link.rstrip("/")}
            for path in ("runs", "compare?runs=a", "live?run=a", "log?run=a&rank=0", "delete"):
                method = "POST" if path == "delete" else "GET"
                async with browser.request(method, link + path, data=b"x" if path == "delete" else None) as answer:
                    assert answer.status == 401
            async with browser.get(link) as shell:
                policy = shell.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "one" not in (await shell.text()).split()
            async with browser.post(f"{link}enter", data=KEY, headers=ours) as entered:
                assert entered.status == 204
                folder = entered.headers["Content-Location"]
            async with browser.get(f"{link}{folder}runs") as answer:
                runs = {run["name"]: run["key"] for run in (await answer.json())["runs"]}
            token = {"X-Phalanx-Token": folder.rstrip("/")}

            async def delete(body: str, **headers: str) -> int:
                async with browser.post(f"{link}{folder}delete", data=body, headers=headers) as answer:
                    return answer.status

            assert await delete(runs["one"], **ours) == 403  # without the token
            assert await delete(runs["one"], **ours, **{"X-Phalanx-Token": "0" * 32}) == 403
            assert await delete(runs["one"], **token, Origin="http://evil.example") == 403
            assert await delete(runs["one"], **token, **{"Sec-Fetch-Site": "cross-site"}) == 403
            assert await delete(runs["one"], **token, Host="evil.example") == 403
            for wrong in ("../../etc", str(home() / "runs" / "one"), "one", "x" * 1000):
                assert await delete(wrong, **ours, **token) == 400
            async with browser.get(f"{link}{folder}delete", headers=token) as answer:
                assert answer.status == 404
            assert len(list((home() / "runs").iterdir())) == 2
            for path in ("live?run=../one", "log?run=one&rank=0", "compare?runs=", f"compare?runs={','.join('a' * 9)}"):
                async with browser.get(link + folder + path) as answer:
                    assert answer.status == 400
            assert await delete(runs["one"], **ours, **token) == 204
            assert [entry.name for entry in (home() / "runs").iterdir()] == ["two"]

    asyncio.run(act())


def test_the_command_prints_a_link_and_ends_with_ctrl_c() -> None:
    with start("ui", "--page-at", "127.0.0.1:0") as job:
        job.wait_for(re.compile(r"http://127\.0\.0\.1:(\d+)/#([\w-]+)"))
        job.signal(signal.SIGINT)
        assert job.wait() == 0
