"""The page of a run with many ranks, in a real Chromium: first paint, from event to pixel, frames while one scrolls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.bench import browser, onlookers
from phalanx.bench.onlookers import LostError
from phalanx.bench.results import Target
from phalanx.errors import PhalanxError

PAINT, LATENCY, FRAMES = 1.0, 0.1, 60  # seconds, seconds, a second
PAINTED = "window.phalanx && window.phalanx.firstPaint"  # milliseconds from the navigation; ranks are to be seen
PAST = 60  # seconds of the run that a page finds when it opens

# The ranks' grid goes up and down, a little each frame. Where there is none, a page that is empty has its frames too.
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
class Panorama:
    """One time that the page was opened, with nothing in the browser's cache."""

    ranks: int
    paint: float = 0.0  # seconds from the navigation until ranks are to be seen
    latency: tuple[float, ...] = ()  # seconds from an event until it is painted
    frames: tuple[float, ...] = ()  # seconds each, while the grid scrolls
    scrolled: int = 0  # pixels that there are to scroll
    idle: tuple[float, ...] = ()  # frames of an empty page in this browser: no page can be smoother
    failure: str = ""


async def measure(ranks: int, times: int, seconds: float, inherited: Mapping[str, str]) -> list[Panorama]:
    found: list[Panorama] = []
    async with served(ranks, PAST, inherited) as link:
        for _ in range(times):
            async with browser.started() as chromium:  # a new one each time: what it had compiled would be kept
                found.append(await _opened(chromium, ranks, link, seconds))
    return found


@contextlib.asynccontextmanager
async def served(ranks: int, past: int, inherited: Mapping[str, str], *, live: bool = True) -> AsyncIterator[str]:
    """The link to the page of a run that a process pretends to be."""
    line = [sys.executable, "-m", "phalanx.bench.pretended", str(ranks), str(past), *(("live",) if live else ())]
    process = subprocess.Popen(
        line, env=dict(inherited), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        address, key = await asyncio.to_thread(onlookers.link, process)
        yield f"http://{address}/#{key}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        if process.stdout is not None:
            process.stdout.close()


async def _opened(chromium: browser.Browser, ranks: int, link: str, seconds: float) -> Panorama:
    page = await chromium.page()
    idle = await page.evaluate(_SCROLL % (seconds * 1000))
    await page.goto(link)
    paint = await page.wait_for(PAINTED)
    await asyncio.sleep(3 * seconds)  # an event a second
    late = await page.evaluate("window.phalanx.latency")
    scroll = await page.evaluate(_SCROLL % (seconds * 1000))
    wrong = f"the page has errors: {page.errors[0]}" if page.errors else ""
    return Panorama(
        ranks,
        round(paint / 1000, 4),
        tuple(round(each / 1000, 4) for each in late),
        _frames(scroll["times"]),
        int(scroll["most"]),
        _frames(idle["times"]),
        wrong,
    )


def _frames(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(round((after - before) / 1000, 5) for before, after in itertools.pairwise(times))


def measured(ranks: int, times: int, seconds: float, inherited: Mapping[str, str]) -> list[Panorama]:
    """One that failed has a reason; without a browser, that is it."""
    try:
        browser.found()
        return asyncio.run(measure(ranks, times, seconds, inherited))
    except (PhalanxError, LostError) as error:
        return [Panorama(ranks, failure=str(error))]


def smooth(frames: Sequence[float], rate: float = FRAMES) -> float:
    """The share of the time in which there was a frame when it was due; a frame that takes two turns has missed one."""
    due = 1 / rate
    turns = [max(1, round(frame / due)) for frame in frames]
    return len(turns) / sum(turns) if turns else 0.0


def targets(found: Sequence[Panorama]) -> list[Target]:
    ranks = found[0].ranks
    good = [one for one in found if not one.failure]
    what = (
        f"page, {ranks} ranks: first paint within {PAINT:.0f} s",
        f"page, {ranks} ranks: {LATENCY * 1000:.0f} ms from event to pixel",
        f"page, {ranks} ranks: {FRAMES} frames a second while scrolling",
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
        judged.append(Target(what[1], "no event was seen", None))
    frames = [each for one in good for each in one.frames]
    idle = [each for one in good for each in one.idle]
    if good[0].scrolled <= 0 or not frames:
        judged.append(Target(what[2], "there was nothing to scroll", None))
        return judged
    share, best = smooth(frames), smooth(idle)
    text = f"{share:.1%} of the frames when they were due; on an empty page {best:.1%}"
    judged.append(Target(what[2], text, _judged(share, best)))
    return judged


def _judged(share: float, best: float) -> bool | None:
    """Met where hardly a frame is missed. Where this machine misses frames of an empty page too, who can tell?"""
    if share >= 0.97:
        return True
    return None if best < 0.97 else False


def _tenth(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, (9 * len(ordered)) // 10)]
