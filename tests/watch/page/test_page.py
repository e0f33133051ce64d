"""The page in a real Chromium, on its real server: access, and what is shown."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from benchmarks.common.browser import wait_for
from phalanx.contract import events
from phalanx.contract.run_metadata import GitState, GpuInfo, Machine, RunMetadata
from phalanx.watch.model import simulation
from phalanx.watch.model.series import resources
from phalanx.watch.page import address as page_address
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

# -- access


def test_without_the_key_nothing_is_shown(stage: Stage) -> None:
    async def act() -> None:
        async with served(await begun()) as address:
            for key in ("", "#wrong"):
                async with opened(stage.chromium, address + key) as page:
                    await wait_for(page, "!document.getElementById('denied').hidden")
                    assert (await page.evaluate("document.body.innerText")).strip() == (
                        "open the link that phalanx run printed"
                    )
                    assert "simulated" not in await page.evaluate("document.documentElement.outerHTML")
                    assert await page.evaluate("document.title") == "phalanx"

    stage.run(act())


def test_the_key_goes_from_the_address_bar_and_is_not_needed_again(stage: Stage) -> None:
    async def act() -> None:
        async with looked_at(stage.chromium, await begun()) as page:
            assert KEY not in await page.evaluate("location.href + document.cookie")
            assert not await page.evaluate("history.length > 2")
            await page.reload()
            await is_(page, "document.getElementById('name').textContent", "train-simulated")
            assert await page.evaluate(
                "performance.getEntriesByType('resource').every(one => one.name.startsWith(origin))"
            )

    stage.run(act())


def test_another_server_on_this_host_is_not_sent_the_cookie(stage: Stage) -> None:
    """Browsers send the cookies of a host to all its ports, and another user may listen there."""
    requests: list[str] = []

    async def other(request: web.BaseRequest) -> web.StreamResponse:
        requests.append(f"{request.headers.get('Cookie', '')} {request.headers.get('Referer', '')}")
        return web.Response(text="<p>come in", content_type="text/html")

    async def act() -> None:
        runner = web.ServerRunner(web.Server(other))
        await runner.setup()
        listener = page_address.listen(page_address.PageAddress(port=0))
        await web.SockSite(runner, listener).start()
        try:
            async with served(await begun()) as address, opened(stage.chromium, f"{address}#{KEY}") as page:
                await is_(page, "document.getElementById('name').textContent", "train-simulated")
                await page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/live")
                await page.reload()
                await page.goto(address)
                await is_(page, "document.getElementById('name').textContent", "train-simulated")
        finally:
            await runner.cleanup()
        assert requests
        assert not any("phalanx" in request for request in requests), requests

    stage.run(act())


# -- what is shown


def test_a_run_from_the_roll_call_to_its_end(stage: Stage) -> None:
    async def act() -> None:
        made = Made(16)
        started, *rest = simulation.begin(16, now=time.time())
        await made.tell(started, rest[0])
        errors: list[str] = []
        async with served(made) as address, opened(stage.chromium, f"{address}#{KEY}", errors=errors) as page:
            # The second node is missing, and joins.
            await wait_for(page, "!document.getElementById('rendezvous').hidden")
            await is_(page, "document.querySelector('#rendezvous .missing').textContent", "◌ node1 is missing")
            await is_(page, "document.querySelector('#rendezvous .joined').textContent", "✓ node0")
            await made.tell(*rest[1:])
            await wait_for(page, "document.getElementById('rendezvous').hidden")
            await wait_for(page, "document.querySelectorAll('.row.rank:not([hidden])').length === 16")
            await is_(page, row(9, "where"), "node1 · gpu 1")
            assert "node1" in await page.evaluate("document.getElementById('event-list').innerText")
            # It trains.
            await made.seconds(17, 19)
            await is_(page, row(3, "step"), "19")
            await is_(page, row(3, "health"), "● healthy")
            await is_(page, "document.querySelector('#figures .value').textContent", "19")
            await is_(page, "document.getElementById('progress').getAttribute('aria-valuenow')", "2")
            # A rank is killed, shown in red and with a symbol; and is replaced.
            await made.seconds(20)
            await is_(page, row(1, "health"), "✕ dead")
            reds = "getComputedStyle(document.querySelector('#rank-1 > .health')).color"
            assert await page.evaluate(reds) == "rgb(179, 33, 27)"
            await is_(page, "document.querySelector('#healths [data-health=dead]').textContent", "✕ 1 dead")
            await wait_for(page, "document.querySelector('#event-list [data-kind=fault]')")
            await made.seconds(21)
            await wait_for(page, "document.querySelector('#event-list [data-kind=recovered]')")
            await is_(page, row(1, "health"), "● healthy")
            # It ends; the page reports that and keeps its content.
            await made.tell(events.RunEnded(time=time.time(), code=0, seconds=30.0))
            await is_(
                page, "document.getElementById('notice').textContent", "The run succeeded. This is its last state."
            )
            await is_(page, "document.getElementById('state').textContent", "done")
            await wait_for(page, "phalanx.status === 'ended'")
            assert await page.evaluate(row(3, "step")) == "21"
            assert errors == []

    stage.run(act())


def test_a_stuck_rank_is_named_and_all_stacks_stand_side_by_side(stage: Stage) -> None:
    async def act() -> None:
        made = await begun()
        stuck, others = "File dataset.py, line 41, in __getitem__", "File train.py, line 88, in step"
        stacks = {rank: stuck if rank == 2 else others for rank in range(4)}
        made.because = WhyAnswer(report="rank 2 is in data loading", stacks=stacks)
        await made.seconds(38, 39)
        async with looked_at(stage.chromium, made) as page:
            assert "why" not in made.asked  # ranks are not queried while all is well
            await made.seconds(40, 43)
            await wait_for(page, "!document.getElementById('verdicts').hidden")
            assert "rank 2 is in data loading" in await page.evaluate("document.getElementById('verdicts').innerText")
            await is_(page, row(2, "health"), "■ stuck")
            await is_(page, row(0, "health"), "◐ waiting")
            columns = "[...document.querySelectorAll('#stacks-list article:not(.report)')].map(one => one.innerText)"
            await wait_for(page, f"{columns}.length === 2")
            assert await page.evaluate(columns) == [f"■ rank 2\n{stuck}", f"rank 0, 1, 3\n{others}"]
            # Which rank waits for which, at the pointer.
            reading = "document.getElementById('reading').textContent"
            await page.evaluate("document.getElementById('timeline').scrollIntoView({block: 'end'})")
            await wait_for(page, f"{reading}.includes('rank 0 · collective · waits for rank 2 (data)')")
            # It continues by itself.
            await made.seconds(50, 51)
            await wait_for(page, "document.getElementById('verdicts').hidden")
            await wait_for(page, "document.getElementById('stacks').hidden")

    stage.run(act())


def test_what_a_run_says_is_text(stage: Stage) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    turned = "\u202e"  # reverses the following text

    async def act() -> None:
        made = Made()
        started, *rest = simulation.begin(4, now=time.time())
        assert isinstance(started, events.RunStarted)
        await made.tell(msgspec.structs.replace(started, run=evil + turned, command=(evil,)), *rest)
        made.output[0, "stdout"] = f"{evil}\n\x1b[31mred\x1b[0m\n10%\r20%\r30%\n"
        made.because = WhyAnswer(report=evil, stacks={0: evil})
        await made.seconds(1, 2)
        verdict = events.VerdictEvent(time=time.time(), kind="data", text=evil, ranks=(0,))
        await made.tell(
            events.MetricsMeasured(time=time.time(), step=1, values={evil: 1.0}),
            events.NoteEvent(time=time.time(), text=evil),
            verdict,
        )
        async with looked_at(stage.chromium, made) as page:
            await page.keyboard.press("l")
            await wait_for(page, "document.getElementById('log').textContent.includes('red')")
            assert await page.evaluate("document.getElementById('log').textContent") == f"{evil}\nred\n30%\n"
            await page.keyboard.press("/")
            await page.keyboard.insert_text("onerror")
            await page.keyboard.press("Enter")
            await wait_for(page, "document.querySelector('#found button')")
            await wait_for(page, "document.querySelector('#stacks-list pre')")
            assert await page.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
            assert await page.evaluate("document.getElementById('name').textContent") == f"{evil}�"

    stage.run(act())


def test_curves_and_the_timeline_are_drawn(stage: Stage) -> None:
    drawn = """(canvas => { const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const seen = new Set(); for (let at = 0; at < data.length; at += 4) if (data[at + 3] == 255)
        seen.add(data.slice(at, at + 3).join()); return [...seen]; })"""

    async def act() -> None:
        made = await begun()
        await made.seconds(15, 25)
        async with looked_at(stage.chromium, made) as page:
            names = "[...document.querySelectorAll('#charts figure')].map(one => one.dataset.curve)"
            assert await page.evaluate(names) == [
                *("loss", "accuracy", "steps/s", "samples/s"),
                *resources.RESOURCES,
            ]
            loss = "document.querySelector('#charts canvas')"
            await wait_for(page, f"{drawn}({loss}).includes('43,106,163')")  # the curve
            assert await page.evaluate(f"{drawn}({loss}).includes('179,33,27')")  # the fault, on the time axis
            await page.keyboard.press("x")
            await wait_for(page, f"!{drawn}({loss}).includes('179,33,27')")
            assert await page.evaluate("document.getElementById('over-steps').getAttribute('aria-pressed')") == "true"
            assert "loss over steps" in await wait_for(page, f"{loss}.ariaLabel.includes('steps') && {loss}.ariaLabel")

            await page.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
            lanes = "document.querySelector('#lanes canvas')"
            await wait_for(page, f"{drawn}({lanes}).includes('215,154,52')")  # data loading
            x, y = await page.evaluate(f"(box => [box.right - 4, box.bottom - 16])({lanes}.getBoundingClientRect())")
            x0 = await page.evaluate(f"{lanes}.getBoundingClientRect().left")
            await page.mouse.move(x0 + (x - x0) * 0.2, y)
            text = await wait_for(
                page, "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
            )
            assert text.startswith("rank 3 · ")
            assert text.split(" · ")[1] in events.LETTERS
            # Zoom in, out, and move on: only the live button changes to live.
            live = "document.getElementById('now').getAttribute('aria-pressed')"
            await is_(page, live, "true")
            await page.keyboard.press("+")
            await page.keyboard.press("+")
            await page.keyboard.press("ArrowLeft")
            await is_(page, live, "false")
            await page.keyboard.press("f")
            await is_(page, live, "true")

    stage.run(act())


def test_a_constant_curve_stands_at_its_value_and_curves_are_smoothed_scaled_and_saved(
    stage: Stage, tmp_path: Path
) -> None:
    evil = "=cmd|' /C calc'!A0"
    ticks = """(name => { const texts = []; const known = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            if (this.canvas === document.querySelector(`[data-curve="${name}"] canvas`)) texts.push(text);
            return known.call(this, text, ...rest); };
        window.drawn = texts; })"""

    async def act() -> None:
        made = await begun()
        await made.seconds(1, 3)
        now = time.time()
        for step in range(1, 41):
            values = {"lr": 3e-4, "zigzag": 10.0 if step % 2 else 1000.0, evil: 1.0}
            values |= {"narrow": 0.55 + step * 2e-5, "tiny": 1.64094e-12}
            await made.tell(events.MetricsMeasured(time=now - 41 + step, step=step, values=values))
        async with looked_at(stage.chromium, made) as page:
            value = "document.querySelector('[data-curve=%s] .value').textContent"
            await is_(page, value % "lr", "0.0003")
            await page.evaluate(f"{ticks}('lr')")
            await page.keyboard.press("x")
            await wait_for(page, "window.drawn.includes('0.0003')")  # the only tick is its value
            assert "0" not in await page.evaluate("window.drawn.slice(0, 1)")
            await page.evaluate("document.querySelector('[data-curve=zigzag]').scrollIntoView()")
            await is_(page, value % "zigzag", "1000")
            await page.evaluate(f"{ticks}('zigzag')")
            await page.click("#log-scale")
            await wait_for(page, "window.drawn.includes('100')")
            # Ticks that are close to each other differ, and long ones fit beside the chart.
            await page.evaluate("document.querySelector('[data-curve=narrow]').scrollIntoView()")
            await page.evaluate(f"{ticks}('narrow')")
            await page.keyboard.press("x")
            await wait_for(page, "window.drawn.filter(text => text.startsWith('0.55')).length >= 2")
            found = await page.evaluate("window.drawn.filter(text => text.startsWith('0.55'))")
            assert len(set(found)) >= 2, found
            await page.evaluate("document.querySelector('[data-curve=tiny]').scrollIntoView()")
            await page.evaluate(f"{ticks}('tiny')")
            await page.keyboard.press("x")
            await wait_for(page, r"window.drawn.some(text => /^1\.6\d?e-12$/.test(text))")
            await page.evaluate("document.querySelector('[data-curve=zigzag]').scrollIntoView()")
            await is_(page, "document.getElementById('log-scale').getAttribute('aria-pressed')", "true")
            await page.evaluate(
                "(x => { x.value = 0.9; x.dispatchEvent(new Event('input')); })(document.getElementById('smooth'))"
            )
            shown = await wait_for(page, f"({value % 'zigzag'} !== '1000') && {value % 'zigzag'}")
            assert 400 < float(shown) < 650
            async with page.expect_download() as csv:
                await page.click("#save-csv")
            await (await csv.value).save_as(tmp_path / "curves.csv")
            async with page.expect_download() as png:
                await page.click("#save-png")
            await (await png.value).save_as(tmp_path / "curves.png")
            assert ((await csv.value).suggested_filename, (await png.value).suggested_filename) == (
                "train-simulated.csv",
                "train-simulated.png",
            )
        lines = (tmp_path / "curves.csv").read_text().splitlines()
        assert lines[0] == "curve,run,step,seconds,value"
        assert sum(line.startswith("zigzag,train-simulated,") for line in lines) == 40
        assert any(line.startswith("'=cmd") for line in lines)
        assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    stage.run(act())


def test_the_metadata_of_the_run_is_shown(stage: Stage) -> None:
    async def act() -> None:
        made = await begun()
        await made.seconds(1, 2)
        async with looked_at(stage.chromium, made) as page:
            assert await page.evaluate("document.getElementById('about').hidden")  # of a run that does not say
            metadata = RunMetadata(
                run="train-simulated",
                name="<b>",
                started=time.time(),
                command=("train.py",),
                script="/home/me/train.py",
                hyperparameters={"lr": 0.1, "amp": True},
                git=GitState(root="/home/me", commit="3f" * 20, branch="main", dirty=True),
                versions={"torch": "2.9.1", "cuda": "12.8"},
                machine=Machine(host="a", cpus=8, memory=1 << 34, gpus=(GpuInfo(index=0, name="H200"),) * 2),
            )
            await made.tell(events.RunDescribed(time=time.time(), metadata=metadata))
            line = "lr 0.1 · amp true · commit 3f3f3f3* · torch 2.9.1"
            await is_(page, "document.getElementById('about-line').textContent", line)
            await page.click("#about-line")
            facts = await page.evaluate("document.getElementById('about-facts').innerText")
            for text in ("uncommitted changes", "main", "12.8", "2 × H200", "16.0 GiB", "/home/me/train.py"):
                assert text in facts
            await page.reload()
            await is_(page, "document.getElementById('about-line').textContent", line)

    stage.run(act())


def test_a_run_that_is_stopped_and_epochs(stage: Stage) -> None:
    async def act() -> None:
        made = await begun()
        await made.seconds(1, 2)
        now = time.time()
        await made.tell(events.MetricsMeasured(time=now, step=5, epoch=2, epochs=10, total=50, values={"loss": 1.0}))
        async with looked_at(stage.chromium, made) as page:
            small = "[...document.querySelectorAll('#figures .small')].map(one => one.textContent)"
            await wait_for(page, f"{small}.includes('epoch 2/10')")
            await made.tell(
                events.Stopping(time=now, reason="SIGINT received", signal="SIGINT"),
                events.RunEnded(time=now + 1, code=130, seconds=9.0),
            )
            await is_(page, "document.getElementById('state').textContent", "stopped by Ctrl-C")
            notice = "The run was stopped by Ctrl-C. This is its last state."
            await is_(page, "document.getElementById('notice').textContent", notice)
            await is_(page, row(1, "health"), "□ stopped")

    stage.run(act())


def test_a_run_that_is_preempted(stage: Stage) -> None:
    async def act() -> None:
        made = await begun()
        await made.seconds(1, 2)
        now = time.time()
        async with looked_at(stage.chromium, made) as page:
            await made.tell(
                events.Preempted(time=now, step=5, seconds=0.5),
                events.RunEnded(time=now + 1, code=75, seconds=9.0, preempted=True),
            )
            await is_(page, "document.getElementById('state').textContent", "preempted")
            notice = "The run was preempted. This is its last state."
            await is_(page, "document.getElementById('notice').textContent", notice)

    stage.run(act())


def test_links_and_the_slow_one(stage: Stage) -> None:
    async def act() -> None:
        async with looked_at(stage.chromium, await begun(32)) as page:
            await wait_for(page, "document.querySelectorAll('.ring circle').length === 4")
            slow = "[...document.querySelectorAll('.pairs .slow')].map(one => one.textContent)"
            assert (await page.evaluate(slow))[0] == "▾ slow node0 ↔ node3: 1.1 GB/s there, 11.5 GB/s back, 21 µs"
            assert len(await page.evaluate(slow)) == 3
            assert await page.evaluate("document.querySelectorAll('.ring line.slow').length") == 3
            assert await page.evaluate("document.querySelectorAll('#nodes .rank-cell').length") == 32

    stage.run(act())
