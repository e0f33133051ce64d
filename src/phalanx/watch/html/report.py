"""One HTML file of a run, to be shared: readable without a script, and without a network, by anybody. Pure.

Everything that comes from the run is text that nobody trusts, and may hold what is nobody's business: it is escaped,
and what looks like a secret is masked. A browser is told to fetch nothing, and to run nothing that is not ours.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.watch.charts import figures, svg, timeline
from phalanx.watch.charts.figures import seconds
from phalanx.watch.html import comparison, masking, sheet
from phalanx.watch.html.comparison import Course
from phalanx.watch.html.markup import Html, facts, folded, joined, pre, table, tag
from phalanx.watch.model.incidents import Incident, Incidents
from phalanx.watch.model.run_model import RankView, RunModel

SIGN = '<meta name="generator" content="phalanx report'
_CHARTS = 12
_RANKS = 1024
_TOLD = 500  # happenings
_STACKS = 200_000  # letters of one stall
_STALLS = 5
_SLOW = 8  # sentences
_LINKS = 200
_LINE = 2000  # letters
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)  # data has a type
_CONTROL = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")  # what a terminal obeys


@dataclass(frozen=True)
class Stood:
    """Nothing went on: why, and what all ranks were at."""

    texts: tuple[str, ...]  # verdicts, with what shows it
    stacks: str = ""


@dataclass(frozen=True)
class ReportTail:
    """The end of what a rank wrote."""

    rank: int
    stream: str
    text: str
    whole: int  # bytes that there are


@dataclass(frozen=True)
class Account:
    """What events do not say."""

    run: str
    state: str  # as `phalanx ps` says it
    command: tuple[str, ...]
    version: str  # of phalanx, that wrote this
    made: float
    host: str = ""
    cwd: str = ""
    folder: str = ""
    started: float = 0.0
    first: str = ""  # the first cause in a line
    cause: str = ""  # all that is known of it
    stood: tuple[Stood, ...] = ()
    tails: tuple[ReportTail, ...] = ()
    with_logs: bool = True


def html(account: Account, scene: RunModel, course: Course, ledger: Incidents, *, page: str = "") -> str:
    """`page`: the page of a browser in one file, with its data inside, for those who want to look closer."""
    sections = [
        _head(account, scene, course),
        _section("What happened", _story(account, scene, course, ledger)),
        _section("What ran", _ran(account, scene)),
        _section("How fast", _fast(scene, course), *_charts(course)),
        _section("What failed, and what it cost", *_failed(account, course, ledger)),
        _section("Timeline", *_timeline(scene, course, ledger)),
        _section("Ranks", *_ranks(scene)) if scene.ranks else Html(""),
        _section("Logs", *_logs(account)) if account.with_logs else Html(""),
        _section("Look closer", *_closer(page)) if page else Html(""),
    ]
    made = f"Made by phalanx {account.version} at {figures.moment(account.made)}. It fetches nothing from anywhere."
    style = sheet.style()
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'{SIGN} {account.version}">',
            _policy([style, *_STYLE.findall(page)], _SCRIPT.findall(page)),
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            tag("title", f"{account.run}: {account.state}"),
            f"<style>{style}</style></head><body>",
            tag("main", *sections, id="report"),
            tag("footer", made),
            "</body></html>\n",
        ]
    )


def _closer(page: str) -> list[Html]:
    """In a frame that may run its script, and nothing else: it is nobody there, and has no way out."""
    note = "The page of the run as it was in the end: ranks, curves, phases, logs. This part needs JavaScript."
    inside = escape(page)  # as it is, to the letter: its script is known by its digest
    frame = f'<iframe sandbox="allow-scripts" title="the run, to look at closer" srcdoc="{inside}"></iframe>'
    return [tag("p", note, class_="note"), Html(frame)]


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Nothing from anywhere, and of what is inside only what is known by its digest. It holds for the frame as well."""

    def digests(texts: Iterable[str]) -> str:
        told = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in told)

    allowed = digests(scripts) or "'none'"
    rules = f"default-src 'none'; style-src {digests(styles)}; script-src {allowed}"
    return f"<meta http-equiv=\"Content-Security-Policy\" content=\"{rules}; base-uri 'none'; form-action 'none'\">"


def _section(title: str, *children: str) -> Html:
    return tag("section", tag("h2", title), *children)


def _head(account: Account, scene: RunModel, course: Course) -> Html:
    state = "stopped" if account.state.startswith("stopped") else account.state
    how = {"done": "well", "running": "going", "stopped": "calm"}.get(state, "bad")
    told = [
        ("ranks", str(course.ranks or len(scene.ranks))),
        ("steps", str(course.steps) if course.steps else "–"),
        ("time", seconds(course.seconds)),
        (f"final {course.metric}", figures.number(course.final)),
        ("steps/s", figures.number(course.rates.get("steps/s"))),
        ("faults", str(course.faults)),
        ("goodput", "–" if course.goodput is None else f"{course.goodput:.1%}"),
    ]
    tiles = [tag("div", tag("b", value), tag("span", name)) for name, value in told]
    title = tag("h1", account.run, " ", tag("span", state, class_=f"state {how}"))
    return tag("header", title, tag("div", *tiles, class_="tiles"))


def _story(account: Account, scene: RunModel, course: Course, ledger: Incidents) -> Html:
    """In sentences, for somebody who was not there."""
    began = figures.moment(account.started or scene.started)
    told = [f"It began at {began} with {figures.count(course.ranks, 'rank')}{_where(scene)}."]
    first = _first_step(course)
    if first is not None:
        told.append(f"The first step that was seen was {seconds(first)} after that.")
    faults = [entry for entry in ledger.entries if entry.kind == "fault"]
    survived = [entry for entry in faults if entry.seconds is not None]
    stalls = [entry for entry in ledger.entries if entry.kind == "stall"]
    if survived:
        away = sum(entry.seconds or 0.0 for entry in survived)
        redone = sum(entry.redone for entry in survived)
        again = f", and {figures.count(redone, 'step')} {'was' if redone == 1 else 'were'} made again" if redone else ""
        told.append(f"It survived {figures.count(len(survived), 'fault')}, which took {seconds(away)}{again}.")
    if stalls:
        stood = sum(entry.seconds or 0.0 for entry in stalls)
        told.append(f"It stood still {figures.count(len(stalls), 'time')}, {seconds(stood)} in all: {stalls[0].text}.")
    if len(faults) > len(survived):
        told.append(f"{figures.count(len(faults) - len(survived), 'fault')} it did not get over.")
    if not faults and not stalls and account.state in ("done", "running"):
        told.append("Nothing failed on the way.")
    if course.final is not None:
        low = f", the lowest was {figures.number(course.lowest)}" if course.lowest is not None else ""
        told.append(f"The last {course.metric} was {figures.number(course.final)}{low}.")
    told.append(_ending(account, course))
    return tag("p", " ".join(masking.hidden(sentence) for sentence in told), class_="story")


def _ending(account: Account, course: Course) -> str:
    lasted = seconds(course.seconds)
    if account.state == "running":
        return f"When this was written it had run for {lasted}, and was at step {course.steps}."
    if account.state == "done":
        return (
            f"It ended well after {lasted}, at step {course.steps}."
            if course.steps
            else f"It ended well after {lasted}."
        )
    if account.state == "killed":
        return f"Then, after {lasted}, nothing more was written: its agent was killed."
    if account.state.startswith("stopped"):
        return f"It was stopped after {lasted}{f', at step {course.steps}' if course.steps else ''}."
    return f"It ended after {lasted}: {account.state}{f', because {account.first}' if account.first else ''}."


def _where(scene: RunModel) -> str:
    hosts = dict.fromkeys(view.host for view in scene.ranks.values() if view.host)
    devices = {view.device for view in scene.ranks.values() if view.device}
    told = f" on {figures.count(len(hosts), 'node')}" if hosts else ""
    return told + (", each with a GPU" if devices and all(view.device for view in scene.ranks.values()) else "")


def _ran(account: Account, scene: RunModel) -> Html:
    by_host: dict[str, list[RankView]] = {}
    for view in sorted(scene.ranks.values(), key=lambda view: view.rank):
        by_host.setdefault(view.host or account.host or "?", []).append(view)
    rows = [
        (
            host,
            figures.spans([view.rank for view in views]),
            ", ".join(dict.fromkeys(view.device or "CPU" for view in views)),
        )
        for host, views in by_host.items()
    ]
    told = facts(
        [
            ("command", tag("code", shlex.join(masking.command(account.command)))),
            ("in", account.cwd),
            ("led by", account.host),
            ("began", figures.moment(account.started or scene.started)),
            ("ended", figures.moment(scene.ended) if scene.ended else ""),
            ("start", _imports(scene)),
            ("folder", account.folder),
        ]
    )
    parts = [told]
    if rows:
        parts.append(table(("node", "ranks", "devices"), rows))
    if scene.links is not None and scene.links.pairs:
        pairs = [
            (link.one, link.other, f"{link.latency * 1e6:.0f} µs", figures.speed(link.there), figures.speed(link.back))
            for link in scene.links.pairs[:_LINKS]
        ]
        told_at = f"Between nodes, as the doctor measured it at {figures.moment(scene.links.measured)}"
        parts.append(folded(told_at, table(("one", "other", "latency", "there", "back"), pairs, numbers=(2, 3, 4))))
    return joined(parts)


def _fast(scene: RunModel, course: Course) -> Html:
    told = facts(
        [
            ("steps/s", _known(course.rates.get("steps/s"), "median")),
            ("samples/s", _known(course.rates.get("samples/s"), "median, of all ranks")),
            ("steps", f"{course.steps}{f' of {scene.total}' if scene.total else ''}" if course.steps else ""),
            (f"lowest {course.metric}", figures.number(course.lowest) if course.lowest is not None else ""),
            ("goodput", "" if course.goodput is None else f"{course.goodput:.1%} of the time since the first step"),
        ]
    )
    slow = list(dict.fromkeys(one.text for one in scene.happenings if one.kind == "slow"))[-_SLOW:]
    return joined([told, tag("ul", *(tag("li", masking.hidden(text)) for text in slow)) if slow else ""])


def _imports(scene: RunModel) -> str:
    """What the first seconds went to."""
    if scene.imports is None:
        return ""
    longest = max(scene.imports.imports.items(), key=lambda one: one[1], default=None)
    most = f", {longest[0]} alone {seconds(longest[1])}" if longest else ""
    return f"{scene.imports.way}: imports took {seconds(scene.imports.seconds)}{most}"


def _charts(course: Course) -> list[Html]:
    names = [course.metric, *comparison.RATES, *course.known]
    shown = [name for name in dict.fromkeys(names) if course.curves.get(name)]
    if not shown:
        return [tag("p", "Nothing was measured: no step was seen, and no loss was told.")]
    parts = []
    for name in shown[:_CHARTS]:
        # how fast it was is a matter of time: a stall is not to be seen over steps
        chart = comparison.chart([course], name, over="time" if name in comparison.RATES else "step")
        parts.append(tag("figure", Html(svg.picture([chart], alone=False))))
    if len(shown) > _CHARTS:
        parts.append(tag("p", f"Not drawn: {', '.join(shown[_CHARTS:][:100])}."))
    if course.marks:
        parts.append(tag("p", "Red marks are faults, green ones where it went on.", class_="note"))
    return parts


def _failed(account: Account, course: Course, ledger: Incidents) -> list[Html]:
    parts: list[Html] = []
    if ledger.entries:
        start = account.started
        rows = [_row(entry, start) for entry in ledger.entries[:_TOLD]]
        head = ("after", "what", "ranks", "what became of it", "time lost")
        parts.append(table(head, rows, numbers=(0, 4)))
        more = len(ledger.entries) - len(rows) + ledger.left_out
        if more:
            parts.append(tag("p", f"… and {more} more."))
        lost = f"All of it cost {seconds(course.lost)}."
        if course.goodput is not None:
            lost += f" Goodput: {course.goodput:.1%}, the share of the time since the first step that was not lost."
        parts.append(tag("p", lost))
    else:
        parts.append(tag("p", "Nothing failed that it had to survive."))
    if account.cause:
        parts += [tag("h3", "First cause"), pre(plain(account.cause))]
    for number, stood in enumerate(account.stood[:_STALLS], 1):
        parts.append(tag("h3", f"Verdict {number}" if len(account.stood) > 1 else "Verdict"))
        parts += [pre(plain(text)) for text in stood.texts]
        if stood.stacks:
            cut = " (cut)" if len(stood.stacks) > _STACKS else ""
            parts.append(folded(f"What all ranks were at{cut}", pre(plain(stood.stacks[:_STACKS]))))
    if len(account.stood) > _STALLS:
        parts.append(tag("p", f"… and {len(account.stood) - _STALLS} more, in the folder of the run."))
    return parts


def _row(entry: Incident, start: float) -> tuple[str, ...]:
    after = seconds(max(0.0, entry.time - start)) if start else figures.moment(entry.time)
    lost = "" if entry.seconds is None else seconds(entry.seconds)
    return (after, masking.hidden(entry.text), figures.spans(entry.ranks), entry.outcome, lost)


def _timeline(scene: RunModel, course: Course, ledger: Incidents) -> list[Html]:
    first = _first_step(course)
    begin = None if first is None else scene.started + first
    end = scene.ended or scene.now
    parts = [tag("figure", Html(timeline.whole(scene.started, begin, end, ledger.entries)))]
    views = sorted(scene.ranks.values(), key=lambda view: view.rank)
    if phases := timeline.ranks(views):
        shown = min(len(views), timeline.MOST)
        some = f"; the first {shown} of {len(views)} ranks" if shown < len(views) else ""
        title = f"What each rank was at in the end{some}"
        parts.append(tag("figure", tag("figcaption", title), Html(phases)))
    told = [
        tag("li", tag("time", figures.clock(one.time)), " ", tag("b", one.kind), " ", masking.hidden(plain(one.text)))
        for one in list(scene.happenings)[-_TOLD:]
    ]
    if told:
        parts.append(folded(f"Everything that was told ({len(told)})", tag("ol", *told, class_="told")))
    return parts


def _ranks(scene: RunModel) -> list[Html]:
    views = sorted(scene.ranks.values(), key=lambda view: view.rank)
    head = (
        "rank",
        "node",
        "device",
        "health",
        "step",
        "data",
        "compute",
        "waiting",
        "memory",
        "GPU",
        "GPU memory",
        "at",
    )
    rows = [
        (
            str(view.rank),
            view.host or str(view.node),
            view.device or "CPU",
            tag("span", view.health, class_=f"health {view.health}"),
            str(view.step) if view.step >= 0 else "–",
            *(f"{share:.0%}" for share in (view.data, view.compute, view.waiting)),
            figures.size(view.memory),
            f"{view.gpu:.0%}" if view.gpu >= 0 else "–",
            figures.size(view.gpu_memory),
            masking.hidden(view.place),
        )
        for view in views[:_RANKS]
    ]
    note = "As they were seen last. Data, compute and waiting are shares of a rank's time."
    more = [tag("p", f"… and {len(views) - _RANKS} more ranks.")] if len(views) > _RANKS else []
    whole = [tag("p", note, class_="note"), table(head, rows, numbers=(0, 4, 5, 6, 7, 8, 9, 10)), *more]
    return [folded(f"All {len(views)} ranks", *whole)] if len(views) > 32 else [joined(whole)]


def _logs(account: Account) -> list[Html]:
    if not account.tails:
        return [tag("p", "No rank wrote anything that is kept here.")]
    parts = []
    for tail in account.tails:
        size = len(tail.text.encode(errors="replace"))
        part = f", the last {figures.size(size)} of {figures.size(tail.whole)}" if tail.whole > size + 3 else ""
        parts.append(folded(f"rank {tail.rank}, {tail.stream}{part}", pre(plain(tail.text))))
    return parts


def plain(text: str) -> str:
    """As a terminal would show it in the end, without its colours; no secrets; no line without end."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return masking.hidden("\n".join(line if len(line) <= _LINE else line[:_LINE] + " …" for line in lines))


def _first_step(course: Course) -> float | None:
    """Seconds after the start."""
    times = [points[0][1] for name, points in course.curves.items() if points]
    return max(0.0, min(times)) if times else None


def _known(value: float | None, how: str) -> str:
    return "" if value is None else f"{figures.number(value)} ({how})"
