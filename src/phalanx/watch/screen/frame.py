"""One frame: lines for a screen of any size. Pure."""

from __future__ import annotations

import time

from phalanx.watch.charts import plot
from phalanx.watch.model.events_timeline import TimelineEvent
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import grid, head
from phalanx.watch.screen.signs import KINDS, Signs
from phalanx.watch.screen.terminal import text
from phalanx.watch.screen.terminal.canvas import Canvas
from phalanx.watch.screen.terminal.text import Line
from phalanx.watch.screen.view import View

_WIDE = 100  # columns from which the lower part has two panels
_HIGH = 34  # rows from which a curve always fits
_LEAST_LOG = 4  # rows, with its title


def draw(model: RunModel, view: View, canvas: Canvas, now: float) -> list[Line]:
    """Return `height` lines of at most `width` cells. Also updates how much the view shows."""
    view.keep(model)
    top = head.draw(model, canvas, now)
    if canvas.height < 3:
        return top[: canvas.height]
    top = top[: 1 if canvas.height < 8 else 2]
    room = canvas.height - len(top) - 1
    draws = _pane if view.pane is not None else _followed if view.follows else _body
    body = [text.clip(line, canvas.width) for line in draws(model, view, canvas.part(room))[:room]]
    return [*top, *body, *([[]] * (room - len(body))), _bottom(model, view, canvas.width)]


def _body(model: RunModel, view: View, canvas: Canvas) -> list[Line]:
    width, room = canvas.width, canvas.height
    events = _event_rows(model, room)
    rows = len(model.ranks) + 1 if model.ranks else 4
    most = room - events - (_LEAST_LOG if room >= 9 else 0)
    share = max(most if room < 9 else min(most, max(room * 55 // 100, 4)), 1)
    height = min(rows, share)
    if view.overview:
        lines = grid.overview(model, view.rank, canvas.part(max(room - events - 3, share)))
    else:
        view.page = max(height - 1, 1)
        view.keep(model)
        lines = grid.draw(model, view.rank, view.top, canvas.part(height))
    lines = [*lines, *_events(model, canvas.part(events))]
    left = room - len(lines)
    if left < 2:
        return lines
    if width >= _WIDE and left >= 6 and _curve_name(model):
        half = width * 9 // 20
        curve = _curve(model, canvas.part(left, half))
        log = _log(model, view, canvas.part(left, width - half - 1))
        return [*lines, *_beside(log, curve, width - half - 1)]
    if room >= _HIGH and left >= 18 and _curve_name(model):
        lines += _curve(model, canvas.part(10))
    return [*lines, *_log(model, view, canvas.part(room - len(lines)))]


def _beside(left: list[Line], right: list[Line], width: int) -> list[Line]:
    rows = max(len(left), len(right))
    left, right = left + [[]] * (rows - len(left)), right + [[]] * (rows - len(right))
    return [[*text.clip(one, width, fill=""), (" ", ""), *other] for one, other in zip(left, right, strict=True)]


def _rule(title: str, canvas: Canvas, *, right: str = "") -> Line:
    width, signs = canvas.width, canvas.signs
    line: Line = [(signs.rule * 2 + " ", "dim"), (title, "bold"), (" ", "")]
    tail = f" {right} {signs.rule}" if right else ""
    free = width - text.length(line) - text.width(tail)
    if free < 1:
        tail, free = "", max(width - text.length(line), 0)
    return text.clip([*line, (signs.rule * free + tail, "dim")], width)


# -- events


def _event_rows(model: RunModel, room: int) -> int:
    """Return the number of lines for events."""
    if room < 7:
        return 0 if room < 4 else int(bool(model.timeline.latest))
    most = 1 if room < 26 else 3 if room < 34 else 5
    return max(1, min(most, len(model.timeline.latest)))


def _events(model: RunModel, canvas: Canvas) -> list[Line]:
    """Return the latest events, newest last. A current verdict and the root cause of a failure stay visible."""
    height = canvas.height
    if height <= 0:
        return []
    last = list(model.timeline.latest)[-height:]
    verdict = model.problems.verdicts[-1] if model.problems.verdicts else None
    shown = model.problems.cause if model.run.ended is not None else verdict
    if shown is not None and shown not in last:
        last = [shown, *last[-height + 1 :]] if height > 1 else [shown]
    if not last:
        return [[(" no events yet", "dim")]][:height]
    return [_event_line(one, canvas.width, canvas.signs) for one in last]


def _event_line(one: TimelineEvent, width: int, signs: Signs) -> Line:
    style = KINDS.get(one.kind, "")
    when = time.strftime("%H:%M:%S", time.localtime(one.time))
    words = text.clean(" ".join(one.text.split()))
    line: Line = [(f" {when} ", "dim")]
    if one.kind != "note" and not words.startswith(one.kind):
        line.append((f"{one.kind} ", f"bold {style}"))
    return [*line, (text.cut(words, width - text.length(line), signs.dots), style if one.kind == "verdict" else "")]


# -- the curve


def _curve_name(model: RunModel) -> str:
    found = head.loss(model)
    return found[0] if found is not None and len(model.progress.curves[found[0]].points) > 1 else ""


def _curve(model: RunModel, canvas: Canvas) -> list[Line]:
    name = _curve_name(model)
    points = [(float(step), value) for step, _, value in model.progress.curves[name].points]
    rows = plot.lines([plot.Series(name, points)], canvas.width, canvas.height - 1, ascii_only=canvas.signs.ascii_only)
    drawn: list[Line] = [[(piece, "dim" if style == plot.AXIS else "curve") for piece, style in row] for row in rows]
    return [_rule(text.clean(name), canvas), *drawn]


# -- the log


def _log(model: RunModel, view: View, canvas: Canvas, *, wrapped: bool = False) -> list[Line]:
    width, height, signs = canvas.width, canvas.height, canvas.signs
    title = f"rank {view.rank} {signs.dot} {view.stream}"
    hints = f"scrolled back {view.tail.back} lines" if view.tail.back else ""
    lines: list[Line] = [_rule(title, canvas, right=hints)]
    kept = view.tail.shown if view.tail.rank == view.rank and view.tail.stream == view.stream else []
    if view.tail.error:
        return [*lines, [(f" {text.cut(text.clean(view.tail.error), width - 1, signs.dots)}", "dim")]][:height]
    if not kept:
        return [*lines, [(" no output" if model.ranks else "", "dim")]][:height]
    room = max(height - 1, 0)
    kept = kept[: len(kept) - view.tail.back] if view.tail.back else kept
    if wrapped:
        kept = [part for line in kept[-room:] for part in text.wrap(line, width - 1)]
    shown = kept[-room:] if room else []
    return [*lines, *([(" " + text.cut(line, width - 1, signs.dots), "")] for line in shown)][:height]


def _followed(model: RunModel, view: View, canvas: Canvas) -> list[Line]:
    room = canvas.height
    at = sorted(model.ranks).index(view.rank) if view.rank in model.ranks else 0
    lines = grid.draw(model, view.rank, at, canvas.part(2)) if room >= 6 else []
    if room >= 10 and view.rank in model.ranks and model.ranks[view.rank].activity.strip.letters:
        lines.append(grid.phases(model.ranks[view.rank], canvas.width))
    lines += _events(model, canvas.part(1)) if room >= 8 else []
    return [*lines, *_log(model, view, canvas.part(room - len(lines)), wrapped=True)]


# -- text over the whole body


def _pane(_: RunModel, view: View, canvas: Canvas) -> list[Line]:
    if view.pane is None:
        return []
    view.pane.page = max(canvas.height - 1, 1)
    view.pane.fit(canvas.width - 1)
    lines = view.pane.lines
    view.pane.top = max(0, min(view.pane.top, len(lines) - view.pane.page))
    last = min(view.pane.top + view.pane.page, len(lines))
    more = f"{view.pane.top + 1}-{last} of {len(lines)}" if len(lines) > view.pane.page else ""
    shown = lines[view.pane.top : last]
    return [
        _rule(view.pane.title, canvas, right=more),
        *([(f" {line}", "")] for line in shown),
    ]


# -- the last line

_KEYS = (
    ("?", "help"),
    ("q", "leave"),
    ("f", "log"),
    ("e", "stderr"),
    ("s", "stacks"),
    ("d", "debug"),
    ("x", "stop"),
    ("g", "overview"),
)


def _bottom(model: RunModel, view: View, width: int) -> Line:
    if view.question == "stop":
        more = "; Ctrl-C again: kill" if view.owned_by_run else ""
        return _message(f"stop the run?  y / n{more}", "chosen", width)
    if view.word:
        return _message(view.word, "warn", width)
    if view.typed:
        return _message(f"rank {view.typed}", "bold", width)
    if view.over and model.run.ended is None:
        return _message("no more updates from the run; q leaves", "bold", width)
    if view.over:
        code = f", exit code {model.run.code}" if model.run.code is not None else ""
        return _message(f"the run has ended{code}; q leaves", "bold", width)
    if view.question == "stopping" and model.run.ended is None:
        return _message("stopping the run" + ("; Ctrl-C: kill" if view.owned_by_run else ""), "warn", width)
    if view.pane is not None:
        return _message("Esc: close; up, down, PgUp, PgDn: scroll", "dim", width)
    line: Line = [(" ", "")]
    for key, what in _KEYS:
        other = "stdout" if key == "e" and view.stream == "stderr" else what
        line += [(key, "bold"), (f" {other}  ", "dim")]
    seen = ""
    if len(model.ranks) > view.page and not view.follows and not view.overview:
        seen = f"ranks {view.top}-{view.top + view.page - 1} of {len(model.ranks)} " if width >= 60 else ""
    return text.spread(text.clip(line, width - len(seen) - 2), [(seen, "dim")] if seen else [], width)


def _message(words: str, style: str, width: int) -> Line:
    return text.clip([(f" {text.clean(words)} ", style)], width)
