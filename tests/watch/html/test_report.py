"""`phalanx report`: one file with everything, and without secrets."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.common import browser
from phalanx.cli.main import main
from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.diagnose.verdict import Verdict
from phalanx.forkserver import linux
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.watch.html import masking
from phalanx.watch.model import simulation
from phalanx.watch.model.incidents import Incidents
from phalanx.watch.model.series.resources import RESOURCES
from tests.watch.finished_run import START, left, record_at, wrote

EVIL = "</script></pre><script>window.evil = 1</script><img src=http://evil.example/x onerror=alert(1)>"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Outline(HTMLParser):
    """Parses like a browser: every tag closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def text(self, *tags: str) -> str:
        return " ".join(part for tag in tags or self.texts for part in self.texts.get(tag, ()))


def reported(tmp_path: Path, record: RunRecord | str, *options: str) -> str:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.html"
    name = record if isinstance(record, str) else record.folder
    assert main(["report", name, "-o", str(path), *options]) == 0
    return path.read_text()


def frame(outline: Outline) -> str:
    return next(attrs["srcdoc"] or "" for tag, attrs in outline.tags if tag == "iframe")


def data(outline: Outline) -> dict[str, Any]:
    """Return the data of the embedded page."""
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', frame(outline), re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def troubled() -> Iterator[AnyEvent]:
    yield from simulation.run(4, 70, code=1)
    yield events.WorkerFailed(time=START + 71, rank=2, summary="rank 2 failed: ValueError: no such key", code=1)


def failed_run(name: str = "failed") -> RunRecord:
    record = left(name, troubled(), code=1, ranks=4)
    wrote(record, 2, f"step 1\nstep 2\rstep 3\n\x1b[31mred\x1b[0m {EVIL}\n", "stderr")
    wrote(record, 0, "WANDB_API_KEY=hunter2 http://127.0.0.1:29580/#0123456789abcdef0123456789abcdef\n")
    stall = Path(record.folder) / "stall_0"
    stall.mkdir()
    verdict = Verdict(kind="data", ranks=(2,), text=f"rank 2 reads {EVIL}", details=("a detail",), fix="read faster")
    (stall / "verdict.json").write_bytes(msgspec.json.encode([verdict]))
    (stall / "stacks.txt").write_text(f'rank 2 on node 0\n  File "train.py", line 41 in <module> {EVIL}\n')
    return record


def test_it_says_what_ran_how_fast_what_failed_and_what_it_cost(tmp_path: Path) -> None:
    outline = Outline(reported(tmp_path, failed_run()))
    headings = outline.texts["h2"]
    assert headings[:5] == ["Summary", "Setup", "Speed", "Failures", "Timeline"]
    summary = outline.text("p")
    assert "with 4 ranks on 1 node, each with a GPU" in summary
    assert "It survived 1 fault, which cost 0.3 s." in summary
    assert "It stalled 1 time, 10 s in total" in summary
    assert "because rank 2 failed: ValueError: no such key" in summary
    cells = outline.text("td")
    assert "rank 1 failed: SIGKILL" in cells
    assert "regrouped: next step 21, no step lost" in cells
    assert "python3 -u train.py --lr 0.1" in outline.text("code")
    pictures = [attrs.get("aria-label") for tag, attrs in outline.tags if tag == "svg"]
    curves = ["loss", "steps/s", "samples/s", "accuracy", *RESOURCES]
    assert pictures == [*curves, "timeline of the run", "phases of each rank"]
    shown = outline.text("code")
    assert "rank 2 reads" in shown
    assert "fix: read faster" in shown
    assert "line 41 in <module>" in shown
    assert "step 1\nstep 3\nred" in shown  # as shown in a terminal
    assert data(outline)["whole"]["head"]["state"] == "failed"
    assert data(outline)["logs"]["2"]["stderr"].startswith("step 1")


def test_nothing_of_the_run_becomes_markup_or_is_fetched(tmp_path: Path) -> None:
    record = failed_run()
    record_at(record, id=f"r{EVIL}", command=["python", EVIL], cwd=f"{EVIL}\ud800\u202e", host=EVIL)
    text = reported(tmp_path, record)
    outline = Outline(text)
    tags = [tag for tag, _ in outline.tags]
    assert "script" not in tags  # the only scripts are inside the frame
    assert not {"img", "link", "object", "embed", "form", "base"} & set(tags)
    assert not [attrs for _, attrs in outline.tags if {"src", "href", "style"} & attrs.keys()]
    assert not [name for _, attrs in outline.tags for name in attrs if name.startswith("on")]
    policy = next(str(attrs["content"]) for tag, attrs in outline.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    inside = Outline(frame(outline))
    assert [attrs for tag, attrs in inside.tags if tag == "script"] == [{"type": "application/json", "id": "run"}, {}]
    assert "img" not in {tag for tag, _ in inside.tags}


def test_secrets_stay_at_home(tmp_path: Path) -> None:
    record = failed_run()
    record_at(record, command=["python", "train.py", "--api-key", "hunter2", "--hub-token=hunter2", "--tokens", "512"])
    text = reported(tmp_path, record)
    assert "hunter2" not in text
    assert "0123456789abcdef" not in text
    assert "--tokens 512" in text
    assert record.folder in text  # a path is not a secret
    assert "WANDB_API_KEY" not in reported(tmp_path, record, "--no-logs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token=abc", "token=•••"),
        ('{"password":"abc"}', '{"password":"•••"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer •••"),
        ("s3://me:abc@host/x", "s3://me:•••@host/x"),
        ("export HF=hf_abcdefghijklmnopqrstuv", "export HF=•••"),
        ("--secret-key-file x --auth-token abc", "--secret-key-file x --auth-token •••"),
        ("tokens: 512, tokens/s=12k, max_tokens=None", "tokens: 512, tokens/s=12k, max_tokens=None"),
        ("loss=0.3 tokenizer=gpt2", "loss=0.3 tokenizer=gpt2"),
    ],
)
def test_what_looks_like_a_secret(text: str, expected: str) -> None:
    assert masking.hidden(text) == expected


def test_it_is_written_whole_and_over_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left("short", simulation.run(2, 5))
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/short.html\n"
    assert main(["report", "sho"]) == 0  # one of ours is replaced
    (tmp_path / "notes.html").write_text("mine")
    assert main(["report", "-o", "notes.html"]) == 2
    assert "exists, and is not a report of phalanx" in capsys.readouterr().err
    assert main(["report", "-o", str(tmp_path)]) == 2
    assert main(["report", "-o", "no/where.html"]) == 1
    assert (tmp_path / "notes.html").read_text() == "mine"
    assert main(["report", "-f", "-o", "notes.html"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.html", "short.html"]
    capsys.readouterr()
    assert main(["report", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


def test_a_run_that_left_almost_nothing(tmp_path: Path) -> None:
    outline = Outline(reported(tmp_path, left("bare", [], code=None)))
    assert "Its agent was killed" in outline.text("p")
    assert "No steps and no metrics" in outline.text("p")


def test_a_report_of_a_running_run(tmp_path: Path) -> None:
    happened = [event for event in simulation.run(2, 30) if not isinstance(event, events.RunEnded)]
    started = events.ForkServerReady(time=START, pid=7, mode="cold", seconds=2.0, imports={"torch": 1.5, "os": 0.1})
    slow = events.StepTimingReport(
        time=START + 30, ranks=(), slow=(events.SlowRank(rank=1, text="rank 1 keeps the others waiting"),)
    )
    record = left("going", [*happened, started, slow])
    record_at(record, pid=os.getpid(), pid_started=linux.start_time(os.getpid()), ended=None, code=None)
    outline = Outline(reported(tmp_path, record))
    assert "At the time of this report it had run for 31 s and was at step 29." in outline.text("p")
    assert "cold: imports took 2.0 s, torch alone 1.5 s" in outline.text("dd")
    assert "rank 1 keeps the others waiting" in outline.text("li")
    assert not outline.texts.get("h3")  # no root cause


def test_a_metric_may_be_called_tokens_and_a_run_may_be_stopped(tmp_path: Path) -> None:
    metrics = events.MetricsMeasured(time=START + 5, step=2, values={"tokens": 512.0})
    outline = Outline(reported(tmp_path, left("stopped", [*simulation.run(2, 3, code=130), metrics], code=130)))
    assert data(outline)["whole"]["curves"]["tokens"] == [[2, START + 5, 512.0]]
    assert "It was stopped by Ctrl-C after 5.0 s, at step 2." in outline.text("p")
    assert outline.texts["span"][0] == "stopped by Ctrl-C"


@functools.cache
def thousands() -> bytes:
    """Return stacks of the maximum length."""
    return b"".join(b"rank %d\n" % rank + b'  File "x.py", line 1 in <module>\n' * 40 for rank in range(512))


def test_a_big_run_stays_small_enough_to_send(tmp_path: Path) -> None:
    names = [f"metric {number}" for number in range(99)]
    measured = [
        events.MetricsMeasured(time=START + 20 + step, step=step, values=dict.fromkeys(names, step / 7))
        for step in range(900)
    ]
    record = left("big", [*simulation.run(512, 12), *measured], ranks=512)
    for rank in range(40):
        for stream in ("stdout", "stderr"):
            wrote(record, rank, "<p> a line of a log & more\n" * 1000, stream)
    for number in range(6):
        stall = Path(record.folder) / f"stall_{number}"
        stall.mkdir()
        (stall / "verdict.json").write_bytes(msgspec.json.encode([Verdict(kind="data", ranks=(2,), text="slow")]))
        (stall / "stacks.txt").write_bytes(thousands())
    text = reported(tmp_path, record)
    assert len(text.encode()) < 10_000_000
    assert len(text.encode()) > 2_000_000  # much of it was there
    assert text.count("<tr>") > 512
    assert "… and 1 more, in the run folder." in text


def test_the_ledger_says_what_each_fault_cost() -> None:
    incidents = Incidents()
    for event in (
        events.FaultEvent(
            time=5.0, rank=0, reason="node b joined", recovery="regroup", kind="node-joined"
        ),  # nothing has failed
        events.Recovered(time=6.0, generation=1, seconds=1.0, step=3),
        events.FaultEvent(time=10.0, rank=1, reason="killed", recovery="regroup"),
        events.FaultEvent(time=10.1, rank=2, reason="also killed", recovery="regroup"),
        events.Recovered(time=11.0, generation=1, seconds=1.0, step=8, redone=2),
        events.Stalled(time=25.0, seconds=5.0),
        events.VerdictEvent(time=25.1, kind="data", text="rank 3 reads", ranks=(3,)),
        events.FaultEvent(time=30.0, rank=3, reason="hung", recovery="restart"),
        events.Restarted(time=32.0, seconds=2.0),
        events.FaultEvent(time=40.0, rank=0, reason="broken", recovery="stop"),
    ):
        incidents.apply(event)
    assert [(entry.text, entry.seconds, entry.outcome) for entry in incidents.entries] == [
        ("killed", 1.0, "regrouped: next step 8, 2 steps done again"),
        ("also killed", 0.0, "regrouped: next step 8, no step lost"),
        ("rank 3 reads", 10.0, "ended by a fault"),
        ("hung", 2.0, "restarted all ranks"),
        ("broken", None, "the run was stopped"),
    ]


@pytest.mark.extended
def test_in_a_real_browser_nothing_is_wrong_and_nothing_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(reported(tmp_path, failed_run()))
    asked: list[str] = []

    async def look() -> None:
        async with browser.launched() as chromium:
            page = await chromium.new_page()
            errors = browser.collect_errors(page)
            page.on("request", lambda request: asked.append(request.url))
            await page.goto(f"file://{tmp_path}/report.html")
            assert "It survived 1 fault" in await page.evaluate("document.body.innerText")
            assert await page.evaluate("typeof window.evil") == "undefined"
            # A frame that is not visible draws nothing.
            await page.evaluate("document.querySelector('iframe').scrollIntoView()")
            (inside,) = page.main_frame.child_frames
            await browser.wait_for(inside, "document.querySelectorAll('#grid [role=row]').length == 4")
            assert await inside.evaluate("typeof window.evil") == "undefined"
            assert (
                await inside.evaluate("fetch('http://127.0.0.1:9/').then(() => 'let out', () => 'kept in')")
                == "kept in"
            )
            assert [error for error in errors if "127.0.0.1:9" not in error] == []

    asyncio.run(look())
    assert [url for url in asked if not url.startswith(("file:", "about:", "http://127.0.0.1:9/"))] == []
