"""The page of many ranks in Chromium: time to first paint, latency from event to pixel, frames while scrolling."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.common import browser
from benchmarks.common.paths import ROOT
from benchmarks.common.processes import ProcessLostError
from benchmarks.common.targets import Target
from benchmarks.watch.viewers import page_link
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from playwright.async_api import Browser

PAINT, LATENCY, FRAMES = 1.0, 0.1, 60  # targets: seconds, seconds, frames per second
PAINTED = "window.phalanx && window.phalanx.firstPaint"  # milliseconds from the navigation until ranks are visible
PAST = 60  # seconds that the run is old when the page opens

# Scrolls the grid of ranks up and down, a little per frame. Also measures the frames of an empty page, which has none.
_SCROLL = """new Promise(done => {
    const it = document.querySelector('#grid') || document.scrollingElement;
    const most = it.scrollHeight - it.clientHeight, times = [];
    let at = 0, by = 24;
    const frame = now => {
        times.push(now);
        if (now - times[0] > %d) return done({times, most});
        if (at + by > most || at + by < 0) by = -by;
        it.scrollTop = at += by;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
})"""


@dataclass(frozen=True)
class PageSample:
    """One opening of the page, with an empty browser cache."""

    ranks: int
    paint: float = 0.0  # seconds from the navigation until ranks are visible
    latency: tuple[float, ...] = ()  # seconds from an event until it is painted
    frames: tuple[float, ...] = ()  # seconds per frame while the grid scrolls
    scrolled: int = 0  # pixels that can be scrolled
    idle: tuple[float, ...] = ()  # seconds per frame of an empty page: the best possible
    failure: str = ""


async def measure(ranks: int, times: int, seconds: float, inherited: Mapping[str, str]) -> list[PageSample]:
    """Open the page of a simulated run `times` times."""
    found: list[PageSample] = []
    async with served(ranks, PAST, inherited) as link:
        for _ in range(times):
            async with browser.launched() as chromium:  # a new one each time, without compiled code in its cache
                found.append(await _opened(chromium, ranks, link, seconds))
    return found


@contextlib.asynccontextmanager
async def served(ranks: int, past: int, inherited: Mapping[str, str], *, live: bool = True) -> AsyncIterator[str]:
    """Serve the page of a simulated run in another process; yield its link."""
    line = [sys.executable, "-m", "benchmarks.watch.simulated_run", str(ranks), str(past), *(("live",) if live else ())]
    process = subprocess.Popen(
        line, env=dict(inherited), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        address, key = await asyncio.to_thread(page_link, process)
        yield f"http://{address}/#{key}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        if process.stdout is not None:
            process.stdout.close()


async def _opened(chromium: Browser, ranks: int, link: str, seconds: float) -> PageSample:
    page = await chromium.new_page()
    errors = browser.collect_errors(page)
    idle = await page.evaluate(_SCROLL % (seconds * 1000))
    await page.goto(link)
    paint = await browser.wait_for(page, PAINTED)
    await asyncio.sleep(3 * seconds)  # one event per second
    late = await page.evaluate("window.phalanx.latency")
    scroll = await page.evaluate(_SCROLL % (seconds * 1000))
    failure = f"the page has errors: {errors[0]}" if errors else ""
    return PageSample(
        ranks,
        round(paint / 1000, 4),
        tuple(round(each / 1000, 4) for each in late),
        _frames(scroll["times"]),
        int(scroll["most"]),
        _frames(idle["times"]),
        failure,
    )


def _frames(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(round((after - before) / 1000, 5) for before, after in itertools.pairwise(times))


def measure_safely(ranks: int, times: int, seconds: float, inherited: Mapping[str, str]) -> list[PageSample]:
    """Measure the page; a failure, such as a missing browser, becomes a sample with a reason."""
    try:
        browser.find_chromium()
        return asyncio.run(measure(ranks, times, seconds, inherited))
    except (PhalanxError, ProcessLostError) as error:
        return [PageSample(ranks, failure=str(error))]


def frames_on_time(frames: Sequence[float], rate: float = FRAMES) -> float:
    """Return the share of frames that were on time; a frame that takes two periods has missed one."""
    due = 1 / rate
    turns = [max(1, round(frame / due)) for frame in frames]
    return len(turns) / sum(turns) if turns else 0.0


def targets(found: Sequence[PageSample]) -> list[Target]:
    """Judge all targets of the page."""
    ranks = found[0].ranks
    good = [one for one in found if not one.failure]
    what = (
        f"page, {ranks} ranks: first paint within {PAINT:.0f} s",
        f"page, {ranks} ranks: {LATENCY * 1000:.0f} ms from event to pixel",
        f"page, {ranks} ranks: {FRAMES} frames per second while scrolling",
    )
    if not good:
        return [Target(each, found[0].failure, None) for each in what]
    paints = sorted(one.paint for one in good)
    paint = statistics.median(paints)
    late = sorted(each for one in good for each in one.latency)
    judged = [
        Target(
            what[0], f"{paint:.2f} s (median of {len(paints)}, {paints[0]:.2f} to {paints[-1]:.2f} s)", paint <= PAINT
        )
    ]
    if late:
        middle = statistics.median(late)
        text = f"{middle * 1000:.0f} ms (median of {len(late)}; 9 of 10 within {_tenth(late) * 1000:.0f} ms)"
        judged.append(Target(what[1], text, middle <= LATENCY))
    else:
        judged.append(Target(what[1], "no event was painted", None))
    frames = [each for one in good for each in one.frames]
    idle = [each for one in good for each in one.idle]
    if good[0].scrolled <= 0 or not frames:
        judged.append(Target(what[2], "the grid cannot scroll", None))
        return judged
    share, best = frames_on_time(frames), frames_on_time(idle)
    text = f"{share:.1%} of the frames on time; on an empty page {best:.1%}"
    judged.append(Target(what[2], text, _judged(share, best)))
    return judged


def _judged(share: float, best: float) -> bool | None:
    """Judge the share of frames on time: unknown if even an empty page misses frames on this machine."""
    if share >= 0.97:
        return True
    return None if best < 0.97 else False


def _tenth(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, (9 * len(ordered)) // 10)]
