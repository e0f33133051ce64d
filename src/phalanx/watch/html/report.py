"""The report of a run: one HTML file that needs neither scripts nor a network. Pure.

All text of the run is untrusted: it is escaped, and what looks like a secret is masked. A content security policy
forbids the browser to fetch anything and to run other scripts.
"""

from __future__ import annotations

import re
import shlex
from html import escape

from phalanx.watch.charts import formatting, svg, timeline
from phalanx.watch.charts.formatting import seconds
from phalanx.watch.html import comparison, masking, metadata_facts, stylesheet
from phalanx.watch.html.comparison import ComparedRun
from phalanx.watch.html.markup import Html, content_policy, facts, folded, joined, pre, table, tag
from phalanx.watch.html.report_context import ReportContext
from phalanx.watch.model.incidents import Incident, Incidents
from phalanx.watch.model.rank import RankView
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.series.resources import RESOURCES

SIGN = '<meta name="generator" content="phalanx report'
_CHARTS = 12
_RANKS = 1024
_EVENTS = 500
_STACKS = 200_000  # characters per stall
_STALLS = 5
_SLOW = 8  # sentences
_LINKS = 200
_LINE = 2000  # characters
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)  # without a type: not the data
_CONTROL = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])"
)  # terminal escape sequences


def html(context: ReportContext, model: RunModel, run: ComparedRun, incidents: Incidents, *, page: str = "") -> str:
    """Return the report. `page`: the interactive page in one file, with its data."""
    sections = [
        _head(context, model, run),
        _section("Summary", _summary(context, model, run, incidents)),
        _section("Setup", _setup(context, model)),
        _section("Speed", _speed(model, run), *_charts(run)),
        _section("Failures", *_failures(context, run, incidents)),
        _section("Timeline", *_timeline(model, run, incidents)),
        _section("Ranks", *_ranks(model)) if model.ranks else Html(""),
        _section("Logs", *_logs(context)) if context.with_logs else Html(""),
        _section("Interactive page", *_embedded(page)) if page else Html(""),
    ]
    made = f"Made by phalanx {context.version} at {formatting.moment(context.made)}. It loads nothing from the network."
    style = stylesheet.style()
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'{SIGN} {context.version}">',
            content_policy([style, *_STYLE.findall(page)], _SCRIPT.findall(page)),
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            tag("title", f"{context.run}: {context.state}"),
            f"<style>{style}</style></head><body>",
            tag("main", *sections, id="report"),
            tag("footer", made),
            "</body></html>\n",
        ]
    )


def _embedded(page: str) -> list[Html]:
    """Embed the page in a frame that may run its own script and nothing else."""
    note = "The page of the run in its last state: ranks, curves, phases, logs. This part needs JavaScript."
    inside = escape(page)  # unchanged: the policy allows its script by digest
    may = "allow-scripts allow-downloads"  # it saves curves as CSV and PNG
    frame = f'<iframe sandbox="{may}" title="interactive page of the run" srcdoc="{inside}"></iframe>'
    return [tag("p", note, class_="note"), Html(frame)]


def _section(title: str, *children: str) -> Html:
    return tag("section", tag("h2", title), *children)


def _head(context: ReportContext, model: RunModel, run: ComparedRun) -> Html:
    state = "stopped" if _was_stopped(context) else context.state
    how = {"done": "good", "running": "going", "stopped": "calm"}.get(state, "bad")
    shown = model.run.words if state == "stopped" and model.run.state == "stopped" else state
    values = [
        ("ranks", str(run.ranks or len(model.ranks))),
        ("steps", str(run.steps) if run.steps else "–"),
        ("time", seconds(run.seconds)),
        (f"final {run.metric}", formatting.number(run.final)),
        ("steps/s", formatting.number(run.rates.get("steps/s"))),
        ("faults", str(run.faults)),
        ("goodput", "–" if run.goodput is None else f"{run.goodput:.1%}"),
    ]
    tiles = [tag("div", tag("b", value), tag("span", name)) for name, value in values]
    title = tag("h1", context.run, " ", tag("span", shown, class_=f"state {how}"))
    return tag("header", title, tag("div", *tiles, class_="tiles"))


def _summary(context: ReportContext, model: RunModel, run: ComparedRun, incidents: Incidents) -> Html:
    """Return the run in a few sentences."""
    began = formatting.moment(context.started or model.run.started)
    sentences = [f"The run started at {began} with {formatting.count(run.ranks, 'rank')}{_where(model)}."]
    first = _first_step(run)
    if first is not None:
        sentences.append(f"The first step came after {seconds(first)}.")
    faults = [entry for entry in incidents.entries if entry.kind == "fault"]
    survived = [entry for entry in faults if entry.seconds is not None]
    stalls = [entry for entry in incidents.entries if entry.kind == "stall"]
    if survived:
        away = sum(entry.seconds or 0.0 for entry in survived)
        redone = sum(entry.redone for entry in survived)
        again = f"; {formatting.count(redone, 'step')} done again" if redone else ""
        sentences.append(f"It survived {formatting.count(len(survived), 'fault')}, which cost {seconds(away)}{again}.")
    if stalls:
        stalled = sum(entry.seconds or 0.0 for entry in stalls)
        sentences.append(
            f"It stalled {formatting.count(len(stalls), 'time')}, {seconds(stalled)} in total: {stalls[0].text}."
        )
    if len(faults) > len(survived):
        sentences.append(f"It did not recover from {formatting.count(len(faults) - len(survived), 'fault')}.")
    if not faults and not stalls and context.state in ("done", "running"):
        sentences.append("Nothing failed.")
    if run.final is not None:
        low = f", the lowest was {formatting.number(run.lowest)}" if run.lowest is not None else ""
        sentences.append(f"The last {run.metric} was {formatting.number(run.final)}{low}.")
    sentences.append(_ending(context, run))
    return tag("p", " ".join(masking.hidden(sentence) for sentence in sentences), class_="summary")


def _ending(context: ReportContext, run: ComparedRun) -> str:
    lasted = seconds(run.seconds)
    if context.state == "running":
        return f"At the time of this report it had run for {lasted} and was at step {run.steps}."
    if context.state == "done":
        return f"It succeeded after {lasted}, at step {run.steps}." if run.steps else f"It succeeded after {lasted}."
    if context.state == "killed":
        return f"Its agent was killed after {lasted}."
    if _was_stopped(context):
        return f"It was {context.state} after {lasted}{f', at step {run.steps}' if run.steps else ''}."
    return f"It ended after {lasted}: {context.state}{f', because {context.first}' if context.first else ''}."


def _was_stopped(context: ReportContext) -> bool:
    return context.state == "preempted" or context.state.startswith("stopped")


def _where(model: RunModel) -> str:
    locations = [view.location for view in model.ranks.values()]
    hosts = dict.fromkeys(location.host for location in locations if location.host)
    nodes = f" on {formatting.count(len(hosts), 'node')}" if hosts else ""
    return nodes + (", each with a GPU" if locations and all(location.device for location in locations) else "")


def _setup(context: ReportContext, model: RunModel) -> Html:
    by_host: dict[str, list[RankView]] = {}
    for view in sorted(model.ranks.values(), key=lambda view: view.rank):
        by_host.setdefault(view.location.host or context.host or "?", []).append(view)
    rows = [
        (
            host,
            formatting.spans([view.rank for view in views]),
            ", ".join(dict.fromkeys(view.location.device or "CPU" for view in views)),
        )
        for host, views in by_host.items()
    ]
    about = facts(
        [
            ("command", tag("code", shlex.join(masking.command(context.command)))),
            ("working directory", context.cwd),
            ("leader", context.host),
            ("started", formatting.moment(context.started or model.run.started)),
            ("ended", formatting.moment(model.run.ended) if model.run.ended else ""),
            *metadata_facts.pairs(model.metadata),
            ("imports", _imports(model)),
            ("folder", context.folder),
        ]
    )
    parts = [about]
    given = metadata_facts.hyperparameters(model.metadata)
    if given is not None:
        parts.append(given)
    if rows:
        parts.append(table(("node", "ranks", "devices"), rows))
    if model.links is not None and model.links.pairs:
        pairs = [
            (
                link.one,
                link.other,
                f"{link.latency * 1e6:.0f} µs",
                formatting.speed(link.there),
                formatting.speed(link.back),
            )
            for link in model.links.pairs[:_LINKS]
        ]
        title = f"Links between nodes, measured by phalanx doctor at {formatting.moment(model.links.measured)}"
        parts.append(folded(title, table(("one", "other", "latency", "there", "back"), pairs, numbers=(2, 3, 4))))
    return joined(parts)


def _speed(model: RunModel, run: ComparedRun) -> Html:
    total = model.progress.total
    speeds = facts(
        [
            ("steps/s", _known(run.rates.get("steps/s"), "median")),
            ("samples/s", _known(run.rates.get("samples/s"), "median, of all ranks")),
            ("steps", f"{run.steps}{f' of {total}' if total else ''}" if run.steps else ""),
            (f"lowest {run.metric}", formatting.number(run.lowest) if run.lowest is not None else ""),
            ("goodput", "" if run.goodput is None else f"{run.goodput:.1%} of the time since the first step"),
        ]
    )
    slow = list(dict.fromkeys(one.text for one in model.timeline.latest if one.kind == "slow"))[-_SLOW:]
    return joined([speeds, tag("ul", *(tag("li", masking.hidden(text)) for text in slow)) if slow else ""])


def _imports(model: RunModel) -> str:
    """Return how long imports took."""
    if model.fork_server is None:
        return ""
    longest = max(model.fork_server.imports.items(), key=lambda one: one[1], default=None)
    most = f", {longest[0]} alone {seconds(longest[1])}" if longest else ""
    return f"{model.fork_server.mode}: imports took {seconds(model.fork_server.seconds)}{most}"


def _charts(run: ComparedRun) -> list[Html]:
    names = [run.metric, *comparison.RATES, *run.known, *RESOURCES]
    shown = [name for name in dict.fromkeys(names) if run.curves.get(name)]
    if not shown:
        return [tag("p", "No steps and no metrics.")]
    parts = []
    for name in shown[:_CHARTS]:
        # rates over time: over steps a stall is invisible
        chart = comparison.chart([run], name, over="time" if name in (*comparison.RATES, *RESOURCES) else "step")
        parts.append(tag("figure", Html(svg.picture([chart], alone=False))))
    if len(shown) > _CHARTS:
        parts.append(tag("p", f"Not drawn: {', '.join(shown[_CHARTS:][:100])}."))
    if run.marks:
        parts.append(tag("p", "Red marks are faults, green marks are recoveries.", class_="note"))
    return parts


def _failures(context: ReportContext, run: ComparedRun, incidents: Incidents) -> list[Html]:
    parts: list[Html] = []
    if incidents.entries:
        start = context.started
        rows = [_row(entry, start) for entry in incidents.entries[:_EVENTS]]
        head = ("after", "what", "ranks", "outcome", "time lost")
        parts.append(table(head, rows, numbers=(0, 4)))
        more = len(incidents.entries) - len(rows) + incidents.left_out
        if more:
            parts.append(tag("p", f"… and {more} more."))
        lost = f"Total time lost: {seconds(run.lost)}."
        if run.goodput is not None:
            lost += f" Goodput: {run.goodput:.1%}, the share of the time since the first step that was not lost."
        parts.append(tag("p", lost))
    else:
        parts.append(tag("p", "Nothing failed."))
    if context.cause:
        parts += [tag("h3", "Root cause"), pre(plain(context.cause))]
    for number, stall in enumerate(context.stalls[:_STALLS], 1):
        parts.append(tag("h3", f"Verdict {number}" if len(context.stalls) > 1 else "Verdict"))
        parts += [pre(plain(text)) for text in stall.texts]
        if stall.stacks:
            cut = " (cut)" if len(stall.stacks) > _STACKS else ""
            parts.append(folded(f"Stacks of all ranks{cut}", pre(plain(stall.stacks[:_STACKS]))))
    if len(context.stalls) > _STALLS:
        parts.append(tag("p", f"… and {len(context.stalls) - _STALLS} more, in the run folder."))
    return parts


def _row(entry: Incident, start: float) -> tuple[str, ...]:
    after = seconds(max(0.0, entry.time - start)) if start else formatting.moment(entry.time)
    lost = "" if entry.seconds is None else seconds(entry.seconds)
    return (after, masking.hidden(entry.text), formatting.spans(entry.ranks), entry.outcome, lost)


def _timeline(model: RunModel, run: ComparedRun, incidents: Incidents) -> list[Html]:
    first = _first_step(run)
    begin = None if first is None else model.run.started + first
    end = model.run.ended or model.now
    parts = [tag("figure", Html(timeline.whole(model.run.started, begin, end, incidents.entries)))]
    views = sorted(model.ranks.values(), key=lambda view: view.rank)
    if phases := timeline.ranks(views):
        shown = min(len(views), timeline.MOST)
        some = f"; the first {shown} of {len(views)} ranks" if shown < len(views) else ""
        title = f"Phases of each rank at the end{some}"
        parts.append(tag("figure", tag("figcaption", title), Html(phases)))
    entries = [
        tag(
            "li", tag("time", formatting.clock(one.time)), " ", tag("b", one.kind), " ", masking.hidden(plain(one.text))
        )
        for one in list(model.timeline.latest)[-_EVENTS:]
    ]
    if entries:
        parts.append(folded(f"All events ({len(entries)})", tag("ol", *entries, class_="events")))
    return parts


def _ranks(model: RunModel) -> list[Html]:
    views = sorted(model.ranks.values(), key=lambda view: view.rank)
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
            view.location.host or str(view.location.node),
            view.location.device or "CPU",
            tag("span", view.health, class_=f"health {view.health}"),
            str(view.steps.last) if view.steps.last >= 0 else "–",
            *(f"{share:.0%}" for share in view.activity.shares),
            formatting.size(view.usage.memory),
            f"{view.usage.gpu:.0%}" if view.usage.gpu >= 0 else "–",
            formatting.size(view.usage.gpu_memory),
            masking.hidden(view.place),
        )
        for view in views[:_RANKS]
    ]
    note = "Latest values. Data, compute and waiting are shares of the time of a rank."
    more = [tag("p", f"… and {len(views) - _RANKS} more ranks.")] if len(views) > _RANKS else []
    whole = [tag("p", note, class_="note"), table(head, rows, numbers=(0, 4, 5, 6, 7, 8, 9, 10)), *more]
    return [folded(f"All {len(views)} ranks", *whole)] if len(views) > 32 else [joined(whole)]


def _logs(context: ReportContext) -> list[Html]:
    if not context.tails:
        return [tag("p", "No output is stored here.")]
    parts = []
    for tail in context.tails:
        size = len(tail.text.encode(errors="replace"))
        part = f", the last {formatting.size(size)} of {formatting.size(tail.whole)}" if tail.whole > size + 3 else ""
        parts.append(folded(f"rank {tail.rank}, {tail.stream}{part}", pre(plain(tail.text))))
    return parts


def plain(text: str) -> str:
    """Return text as a terminal would show it, without colours and secrets, and with long lines cut."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return masking.hidden("\n".join(line if len(line) <= _LINE else line[:_LINE] + " …" for line in lines))


def _first_step(run: ComparedRun) -> float | None:
    """Return the seconds from the start to the first step."""
    times = [points[0][1] for name, points in run.curves.items() if points]
    return max(0.0, min(times)) if times else None


def _known(value: float | None, how: str) -> str:
    return "" if value is None else f"{formatting.number(value)} ({how})"
