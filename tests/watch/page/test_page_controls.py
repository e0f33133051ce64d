"""The page in a real Chromium, on its real server: controls, many ranks, lost connections, one file."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from statistics import median

import msgspec
import pytest

from benchmarks.common.browser import wait_for
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.page import assets
from phalanx.watch.page.updates import Updates
from phalanx.watch.source import WhyAnswer
from tests.watch.page.browser_stage import Stage, is_, row, stage
from tests.watch.page.fake_source import KEY, Made, begun, looked_at, opened, served

__all__ = ["stage"]
pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.leaves(
        "process:*chromium*", why="one browser for all of them, which keeps processes for the next page"
    ),
]

# -- controls


def test_by_keyboard(stage: Stage) -> None:
    chosen = "Number(document.querySelector('#grid [aria-selected=true]')?.dataset.rank)"

    async def act() -> None:
        made = await begun()
        made.output[2, "stdout"] = "of rank two\n"
        made.output[2, "stderr"] = "a warning\n"
        made.output[3, "stdout"] = "hay\n" * 20_000 + "the needle\n" + "hay\n" * 200_000
        made.output[-1, "stdout"] = "a warning that not all was searched\n"
        await made.seconds(1, 2)
        async with looked_at(stage.chromium, made) as page:
            for key, wanted in (("j", 1), ("ArrowDown", 2), ("k", 1), ("G", 3), ("j", 3), ("g", 0), ("k", 0)):
                await page.keyboard.press(key)
                await is_(page, chosen, wanted)
            await page.keyboard.press("j")
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await is_(page, "document.getElementById('log').textContent", "of rank two\n")
            await page.keyboard.press("/")
            await is_(page, "document.activeElement.id", "search-text")
            await page.keyboard.insert_text("a warn")
            await page.keyboard.press("j")  # only a letter there
            await page.keyboard.press("Backspace")
            await page.keyboard.press("Enter")
            await is_(page, "document.querySelector('#found button')?.textContent", "rank 2 stderra warning")
            # Messages of the search itself belong to no rank.
            output = "[...document.querySelectorAll('#found li:not(:has(button))')].map(one => one.textContent).join()"
            await is_(page, output, "a warning that not all was searched")
            await page.click("#found button")
            await is_(page, "document.getElementById('log').textContent", "a warning\n")
            # In a long log, the line that was found is visible.
            await page.evaluate("document.getElementById('search-text').value = 'needle'")
            await page.keyboard.press("/")
            await page.keyboard.press("Enter")
            await wait_for(page, "document.querySelector('#found button')?.textContent.includes('the needle')")
            await page.click("#found button")
            await is_(page, "document.querySelector('#log mark')?.textContent", "the needle")
            seen = """(([box, mark]) => mark.top > box.top && mark.bottom < box.bottom)(
                ['#log', '#log mark'].map(each => document.querySelector(each).getBoundingClientRect()))"""
            await wait_for(page, seen)
            await asyncio.sleep(1.2)  # it is polled once per second: nothing else runs
            assert await page.evaluate(seen)
            assert await page.evaluate("document.getElementById('log').textContent.length") < 100_000
            await page.evaluate("document.getElementById('search-ranks').value = '0-1,3'")
            await page.evaluate("document.getElementById('search-text').value = 'a warn'")
            await page.keyboard.press("/")
            await page.keyboard.press("Enter")
            await is_(page, "document.querySelector('#found li').textContent", 'no matches for "a warn"')
            assert "search a warn [0, 1, 3]" in made.asked
            await page.keyboard.press("Escape")
            await page.keyboard.press("?")
            await wait_for(page, "document.getElementById('keys').open")
            assert "next rank" in await page.evaluate("document.getElementById('keys').innerText")
            await page.keyboard.press("Escape")
            await wait_for(page, "!document.getElementById('keys').open")
            # Only healthy ranks, with the button that shows their number.
            await page.click("#healths [data-health=healthy]")
            await is_(page, "document.querySelector('#healths button').getAttribute('aria-pressed')", "true")

    stage.run(act())


def test_light_and_dark(stage: Stage) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(245, 243, 238)", "rgb(15, 18, 21)"

    async def act() -> None:
        async with looked_at(stage.chromium, await begun()) as page:
            await is_(page, paper, light)
            await page.emulate_media(color_scheme="dark")
            await is_(page, paper, dark)
            await page.keyboard.press("t")
            await is_(page, paper, light)
            await page.reload()
            await is_(page, paper, light)  # the choice is restored
            await page.evaluate("localStorage.clear()")

    stage.run(act())


@pytest.mark.parametrize("ranks", [4, 512])
def test_on_a_phone_nothing_lies_beside_the_screen(stage: Stage, ranks: int) -> None:
    async def act() -> None:
        made = await begun(ranks)
        made.because = WhyAnswer(report="", stacks=dict.fromkeys(range(ranks), "a long line " * 30))
        await made.seconds(38, 43)
        phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
        async with looked_at(stage.chromium, made, **phone, is_mobile=True, has_touch=True) as page:
            await wait_for(page, "document.querySelector('#stacks-list pre')")
            wide = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide == [390, 390]
            beside = """[...document.querySelectorAll('#view *')].filter(one => one.checkVisibility()
                && !one.closest('.columns, pre, .found, .spoken, .skip, svg')
                && one.getBoundingClientRect().right > 391)
                .map(one => one.outerHTML.slice(0, 80))"""
            assert await page.evaluate(beside) == []

    stage.run(act())


def test_names_and_contrast(stage: Stage) -> None:
    """Every control has a name, and all text is readable, in light and dark mode."""
    nameless = """[...document.querySelectorAll('button, input, [tabindex], canvas[role]')]
        .filter(one => one.checkVisibility() && !(one.ariaLabel || one.textContent.trim()
        || one.getAttribute('aria-labelledby') || one.title))
        .map(one => one.outerHTML.slice(0, 80))"""
    faint = """(() => {
        const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const behind = one => { for (; one; one = one.parentElement) {
            const found = getComputedStyle(one).backgroundColor;
            if (found.startsWith('rgb(')) return found; } return 'rgb(255, 255, 255)'; };
        return [...document.querySelectorAll('#view *')].filter(one => one.checkVisibility()
            && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim())).map(one => {
            const [a, b] = [light(getComputedStyle(one).color), light(behind(one))].sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), one.className + ' ' + one.textContent.slice(0, 40)];
        }).filter(([contrast]) => contrast < 4.5); })()"""

    async def act() -> None:
        made = await begun()
        await made.seconds(18, 20)
        await made.seconds(38, 43)
        async with looked_at(stage.chromium, made) as page:
            await wait_for(page, "!document.getElementById('verdicts').hidden")
            assert await page.evaluate(nameless) == []
            assert await page.evaluate(faint) == []
            await page.emulate_media(color_scheme="dark")
            assert await page.evaluate(faint) == []

    stage.run(act())


# -- many ranks, and lost connections


def test_many_ranks_stay_smooth(stage: Stage) -> None:
    scrolled = """new Promise(done => { const grid = document.getElementById('grid'), times = []; let last;
        const step = now => { if (last !== undefined) times.push(now - last); last = now; grid.scrollTop += 40;
        times.length < 90 ? requestAnimationFrame(step) : done(times); }; requestAnimationFrame(step); })"""
    steps = "[...document.querySelectorAll('.row.rank:not([hidden]) .step')].map(one => one.textContent)"

    async def act() -> None:
        made = await begun(512)
        await made.seconds(1, 30)
        async with looked_at(stage.chromium, made) as page:
            assert await page.evaluate("phalanx.firstPaint") < 30_000  # 0.4 s on an idle machine
            assert await page.evaluate("document.getElementById('grid').ariaRowCount") == "512"
            assert await page.evaluate("document.querySelectorAll('.row.rank').length") < 60

            async def trained() -> None:
                for number in range(31, 36):
                    await made.seconds(number)
                    await asyncio.sleep(0.25)

            frames, _ = await asyncio.gather(page.evaluate(scrolled), trained())
            # 17 ms, the rate of the screen. A slow machine makes some frames late, but no row is created again.
            assert median(frames) < 300
            assert await page.evaluate("document.querySelectorAll('.row.rank').length") < 60
            await wait_for(page, f"{steps}.every(text => text === '35')")
            late = await page.evaluate("phalanx.latency")
            assert len(late) >= 5
            assert 0 < median(late) < 8000  # 20 to 40 ms on an idle machine
            await page.keyboard.press("G")
            await is_(page, row(511, "step"), "35")
            assert await page.evaluate("document.activeElement === document.body")

    stage.run(act())


def test_the_page_reconnects_when_the_server_is_back(stage: Stage) -> None:
    async def act() -> None:
        made = await begun()
        await made.seconds(1, 3)
        async with contextlib.AsyncExitStack() as stack:
            first = contextlib.AsyncExitStack()
            address = await first.enter_async_context(served(made))
            page = await stack.enter_async_context(opened(stage.chromium, f"{address}#{KEY}"))
            await is_(page, row(0, "step"), "3")
            await first.aclose()
            await wait_for(page, "!document.getElementById('notice').hidden")
            assert "Connection lost" in await page.evaluate("document.getElementById('notice').textContent")
            assert await page.evaluate(row(0, "step")) == "3"  # the last received value stays
            await made.seconds(4, 5)
            port = int(address.rstrip("/").rpartition(":")[2])
            second = contextlib.AsyncExitStack()
            await second.enter_async_context(served(made, port))
            await is_(page, row(0, "step"), "5")
            await wait_for(page, "document.getElementById('notice').hidden")
            # It has ended, and another run has its port: the content stays, and the page sends no more requests.
            await second.aclose()
            await stack.enter_async_context(served(Made(), port, key="another"))
            await wait_for(page, "phalanx.status === 'denied'")
            assert "No more updates" in await page.evaluate("document.getElementById('notice').textContent")
            assert await page.evaluate(row(0, "step")) == "5"

    stage.run(act())


# -- in one file


def test_one_file_shows_a_run_that_has_ended(stage: Stage, tmp_path: Path) -> None:
    model = RunModel()
    for event in simulation.run(4, 60):
        model.apply(event)
    whole = msgspec.to_builtins(Updates(model, seconds=600).whole(), str_keys=True)
    because = {"report": "</script><b>report</b>", "stacks": {}}
    logs = {"0": {"stdout": "first\nsecond </script> line\n", "stderr": ""}}
    file = tmp_path / "report.html"
    file.write_text(assets.inlined(msgspec.json.encode({"whole": whole, "logs": logs, "why": because}).decode()))

    async def act() -> None:
        errors: list[str] = []
        async with opened(stage.chromium, file.as_uri(), errors=errors) as page:
            await is_(page, "document.getElementById('notice').textContent", "This run succeeded.")
            await is_(page, row(3, "step"), "59")
            await page.keyboard.press("l")
            await is_(page, "document.getElementById('log').textContent", "first\nsecond </script> line\n")
            await page.keyboard.press("/")
            await page.keyboard.insert_text("SECOND")
            await page.keyboard.press("Enter")
            await is_(page, "document.querySelector('#found mark')?.textContent", "second")
            assert await page.evaluate("performance.getEntriesByType('resource').length") == 0
            assert errors == []

    stage.run(act())


def test_every_script_is_in_the_one_file_and_in_the_page() -> None:
    folder = Path(assets.__file__).parent / "assets"
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        assets.INDEX,
        *assets.names(),
    }
    index = assets.read(assets.INDEX).decode()
    for name in assets.SCRIPTS:
        assert f'"assets/{name}"' in index
    for name in assets.names():
        text = assets.read(name).decode()
        assert "innerHTML" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing comes from elsewhere"
