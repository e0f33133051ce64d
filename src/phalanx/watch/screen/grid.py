"""The ranks: one row each, or one symbol each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.watch.model.rank import RankView
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import numbers
from phalanx.watch.screen.signs import HEALTH_STYLES, Signs
from phalanx.watch.screen.terminal import text
from phalanx.watch.screen.terminal.canvas import Canvas
from phalanx.watch.screen.terminal.text import Line, Piece

_BAR = (10, 30)  # cells, at least and at most
_PLACE = 18  # cells, at least
_LETTERS = {"d": "data", "f": "compute", "b": "compute", "o": "compute", "w": "wait"}  # of contract/events.py
_TITLES = ("data compute wait", "data comp wait", "time")  # the longest that fits


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    keep: int  # columns with the lowest values are dropped first
    cell: Callable[[RankView], str]
    right: bool = True


@dataclass(frozen=True)
class _GridLayout:
    columns: list[_Column]
    bar: int  # cells
    place: int


def draw(model: RunModel, chosen: int, top: int, canvas: Canvas) -> list[Line]:
    """Return a header and as many ranks as fit, beginning with index `top`."""
    views = [model.ranks[rank] for rank in sorted(model.ranks)]
    layout = _layout(views, canvas.width)
    titles = " ".join(text.fit(c.title, c.width, right=c.right) for c in layout.columns)
    titles += f" {text.fit(_title(layout.bar), layout.bar)}" if layout.bar else ""
    titles += " at" if layout.place else ""
    lines: list[Line] = [text.clip([(f"   {titles}", "dim")], canvas.width)]
    for view in views[top : top + canvas.height - 1]:
        lines.append(_row(view, layout, canvas, chosen=view.rank == chosen))
    if not views:
        lines += _rendezvous(model, canvas.width)
    return lines[: canvas.height]


def _title(bar: int) -> str:
    return next((title for title in _TITLES if len(title) <= bar), "")


def _rendezvous(model: RunModel, width: int) -> list[Line]:
    """Return which nodes have joined and which are missing."""
    if model.run.rendezvous is None:
        return [[("   no ranks yet", "dim")]]
    joined, missing = (
        ", ".join(map(text.clean, names)) for names in (model.run.rendezvous.joined, model.run.rendezvous.missing)
    )
    lines: list[Line] = [
        [("   joined: ", "dim"), (joined, "good")],
        [("   missing: ", "dim"), (missing or "?", "warn")],
    ]
    return [text.clip(line, width) for line in (*lines, [(f"   {text.clean(model.run.rendezvous.text)}", "dim")])]


def _layout(views: list[RankView], width: int) -> _GridLayout:
    """Choose the columns that fit."""
    hosts, nodes = {view.location.host for view in views}, {view.location.node for view in views}
    named = len(hosts) == len(nodes)  # otherwise several nodes are on one host: show numbers
    devices = any(view.location.device for view in views)
    gpus = any(view.usage.gpu >= 0 or view.usage.gpu_memory for view in views)
    has_samples = any(view.steps.samples >= 0 for view in views)
    host = min(max((text.width(text.clean(name)) for name in hosts), default=4), 12)
    device = min(max((text.width(text.clean(view.location.device)) for view in views), default=3), 10)
    columns = [
        _Column("rank", max(4, len(str(len(views)))), 9, lambda view: str(view.rank)),
        _Column("node", max(4, host), 3, lambda view: _node(view, named=named), right=False),
        _Column("device", max(6, device), 2, lambda view: text.clean(view.location.device) or "cpu", right=False),
        _Column("phase", 10, 7, _phase, right=False),
        _Column("step", max(6, max((len(str(view.steps.last)) for view in views), default=0)), 8, _step),
        _Column("samp/s" if has_samples else "step/s", 6, 5, _rate),
        _Column("mem", 5, 4, lambda view: numbers.size(view.usage.memory) if view.usage.memory else ""),
        _Column("cpu", 4, 1, lambda view: f"{view.usage.cpu:.1f}"),
        _Column("gpu", 4, 6, lambda view: f"{view.usage.gpu * 100:.0f}%" if view.usage.gpu >= 0 else ""),
        _Column("gmem", 5, 2, lambda view: numbers.size(view.usage.gpu_memory) if view.usage.gpu_memory else ""),
    ]
    if len(nodes) < 2:
        columns = [column for column in columns if column.title != "node"]
    if not devices:
        columns = [column for column in columns if column.title != "device"]
    if not gpus:
        columns = [column for column in columns if column.title not in ("gpu", "gmem")]
    if width < 40:  # narrow
        columns = [replace(column, width=min(column.width, 6)) for column in columns]
    room = width - 4
    while len(columns) > 1 and _sum(columns) + 1 + (_BAR[0] if width >= 50 else 0) > room:
        columns.remove(min(columns, key=lambda column: column.keep))
    free = room - _sum(columns) - 1
    if free - _PLACE - 1 >= len(_TITLES[1]):  # room for both
        bar = min(free - _PLACE - 1, _BAR[1])
        return _GridLayout(columns, bar, free - bar - 1)
    return _GridLayout(columns, min(free, _BAR[1]) if free >= _BAR[0] else 0, 0)


def _sum(columns: list[_Column]) -> int:
    return sum(column.width + 1 for column in columns) - 1


def _row(view: RankView, layout: _GridLayout, canvas: Canvas, *, chosen: bool) -> Line:
    signs = canvas.signs
    style = HEALTH_STYLES.get(view.health, "")
    plain = (
        "bad" if view.health in ("stuck", "dead") else "dim" if view.health in ("starting", "stopped", "done") else ""
    )
    line: Line = [(signs.chosen if chosen else " ", "bold"), (signs.health.get(view.health, "?"), style), (" ", "")]
    for column in layout.columns:
        cell = text.fit(column.cell(view), column.width, right=column.right, dots="")
        if column.title == "rank":
            line += [(cell, "chosen bold" if chosen else plain), (" ", "")]
        else:
            line.append((cell + " ", style if column.title == "phase" else plain))
    if layout.bar:
        line += _bar(view, layout.bar, signs)
    if layout.place:
        where = text.clean(view.place).removesuffix(" <module>")
        if view.silent >= 5:
            where = f"no heartbeat for {numbers.about(view.silent)}; {where}"
        line.append((" " + text.cut(where, layout.place, signs.dots), "dim"))
    return text.clip(line, canvas.width)


def _bar(view: RankView, cells: int, signs: Signs) -> list[Piece]:
    """Return the time shares of the rank as cells."""
    if view.health in ("dead", "stopped", "done", "starting"):
        return [(signs.empty * cells, "dim")]
    shares = view.activity.shares
    known = min(round(sum(shares) * cells), cells)
    data = min(round(shares.data * cells), known)
    waiting = min(round(shares.waiting * cells), known - data)
    compute = known - data - waiting
    return [
        (signs.data * data, "data"),
        (signs.compute * compute, "compute"),
        (signs.waiting * waiting, "wait"),
        (signs.empty * (cells - known), "dim"),
    ]


def phases(view: RankView, width: int) -> Line:
    """Return the recent phases, one letter per tenth of a second."""
    letters = view.activity.strip.letters[-max(width - 12, 1) :]
    line: Line = [(f" last {len(letters) / 10:.0f} s ".ljust(11), "dim")]
    for style, group in itertools.groupby(letters, key=lambda letter: _LETTERS.get(letter.lower(), "dim")):
        line.append(("".join(group), style))
    return line


def _node(view: RankView, *, named: bool) -> str:
    return (named and text.clean(view.location.host)) or str(view.location.node)


def _phase(view: RankView) -> str:
    ends = ("dead", "stuck", "silent", "debugged", "stopped", "done")
    return view.health if view.health in ends else view.activity.phase


def _step(view: RankView) -> str:
    return str(view.steps.last) if view.steps.last >= 0 else "-"


def _rate(view: RankView) -> str:
    return numbers.rate(view.steps.samples if view.steps.samples >= 0 else view.steps.rate)


# -- overview


def overview(model: RunModel, chosen: int, canvas: Canvas) -> list[Line]:
    """Return one symbol per rank, node by node."""
    width, height, signs = canvas.width, canvas.height, canvas.signs
    nodes: dict[int, list[RankView]] = {}
    for rank in sorted(model.ranks):
        nodes.setdefault(model.ranks[rank].location.node, []).append(model.ranks[rank])
    names = {node: text.clean(views[0].location.host) or f"node {node}" for node, views in nodes.items()}
    margin = min(max((text.width(name) for name in names.values()), default=0), 16, width // 3)
    cells = max(width - margin - 3, 8)
    groups: list[Line] = []
    line: Line = []
    for node in sorted(nodes):  # several nodes per line if they fit
        label = text.fit(names[node], margin, dots="")
        for at in range(0, len(nodes[node]), cells):
            part = nodes[node][at : at + cells]
            group: Line = [(f" {label if at == 0 else ' ' * margin} ", "dim"), *(_dot(v, chosen, signs) for v in part)]
            if line and text.length(line) + text.length(group) + 1 > width:
                groups.append(line)
                line = []
            line = [*line, (" ", ""), *group] if line else group
    if line:
        groups.append(line)
    counts = {health: sum(view.health == health for view in model.ranks.values()) for health in signs.health}
    legend: Line = [(" ", "")]
    for health, count in counts.items():
        if count:
            legend += [(f"{signs.health[health]} ", HEALTH_STYLES.get(health, "")), (f"{health} {count}   ", "dim")]
    # The chosen rank is always visible.
    at = next((n for n, row in enumerate(groups) if any("chosen" in style for _, style in row)), 0)
    first = min(max(0, at - (height - 1) // 2), max(0, len(groups) - height + 1))
    return [text.clip(legend, width), *(text.clip(row, width) for row in groups[first : first + height - 1])][:height]


def _dot(view: RankView, chosen: int, signs: Signs) -> Piece:
    style = HEALTH_STYLES.get(view.health, "")
    return signs.health.get(view.health, "?"), f"chosen {style}" if view.rank == chosen else style
