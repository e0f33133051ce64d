"""Timelines as SVG: when the run was stalled or recovering, and the phases of each rank at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.contract.events import LETTERS, UNSEEN
from phalanx.watch.charts.axis import Axis
from phalanx.watch.model.incidents import Incident
from phalanx.watch.model.rank import RankView
from phalanx.watch.model.series.strip import TICK

WIDTH = 880
MOST = 64  # ranks
SECONDS = 60.0  # at the end of the run
_LEFT, _RIGHT = 72, 16
_ROW = 12
_COLOURS = {  # phase: (light, dark), as on the page (page/assets/style.css)
    "import": ("#b7af9f", "#5c6570"),
    "join": ("#9aa6b1", "#74808c"),
    "data": ("#d79a34", "#d9a03f"),
    "forward": ("#5b9bcb", "#5d9dd0"),
    "backward": ("#2f6ea8", "#35699f"),
    "collective": ("#bdb5a4", "#4b545e"),
    "optimizer": ("#8573c2", "#8f7fd0"),
    "checkpoint": ("#3f9a73", "#4aa77e"),
    "compile": ("#b4578f", "#c56ba4"),
    "idle": ("#dcd7cc", "#363d45"),
    "sleep": ("#a9a294", "#5f6770"),
}
_KINDS = {"start": "until the first step", "fault": "after a fault", "stall": "stalled"}


def style() -> str:
    """Return the style sheet of both timelines."""
    light = "".join(f".ph-p-{name}{{stroke:{one};fill:{one}}}" for name, (one, _) in _COLOURS.items())
    dark = "".join(f".ph-p-{name}{{stroke:{one};fill:{one}}}" for name, (_, one) in _COLOURS.items())
    return (
        ".ph .ph-ran{fill:#bfe3d2}.ph .ph-start{fill:#c9ced8}.ph .ph-fault{fill:#b3264a}.ph .ph-stall{fill:#e0a800}"
        f".ph .ph-strip{{fill:none;stroke-width:9}}{light}"
        "@media (prefers-color-scheme:dark){"
        ".ph .ph-ran{fill:#1f4a38}.ph .ph-start{fill:#4a5060}.ph .ph-fault{fill:#ff7f9f}.ph .ph-stall{fill:#d8b93a}"
        f"{dark}}}"
    )


def whole(start: float, first: float | None, end: float, entries: Sequence[Incident]) -> str:
    """Draw the run from start to end: until the first step, after faults, during stalls."""
    axis, wide = Axis(0.0, max(end - start, 1e-3), "seconds"), WIDTH - _LEFT - _RIGHT
    parts = [_head(92, "timeline of the run"), f'<g transform="translate({_LEFT} 16)">']
    base = ("ran", "training") if first is not None else ("start", "no step")
    parts.append(f'<rect class="ph-{base[0]}" width="{wide}" height="26"/>')
    spans = [("start", start, first, _KINDS["start"])] if first is not None else []
    spans += [
        (entry.kind, entry.time, entry.time + (entry.seconds or 0.0), entry.text)
        for entry in entries
        if entry.kind in _KINDS
    ]
    for kind, begin, over, text in spans:
        left = min(1.0, max(0.0, (begin - start) / axis.high)) * wide
        right = min(1.0, max(0.0, (over - start) / axis.high)) * wide
        width = max(1.5, right - left)  # wide enough to be visible
        title = f"<title>{_text(text[:300])} ({over - begin:.1f} s)</title>"
        parts.append(f'<rect class="ph-{kind}" x="{left:.1f}" width="{width:.1f}" height="26">{title}</rect>')
    parts.append(_across(axis, wide, 26))
    names = [base, *((kind, _KINDS[kind]) for kind in _KINDS if any(span[0] == kind for span in spans))]
    x = 0.0
    for kind, name in names:
        parts.append(f'<rect class="ph-{kind}" x="{x:.0f}" y="58" width="11" height="11"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="68">{name}</text>')
        x += 40 + len(name) * 6.6
    return "".join([*parts, "</g></svg>"])


def ranks(views: Sequence[RankView]) -> str:
    """Draw the phases of each rank in the last sampled minute. Empty: nothing was sampled."""
    shown = [view for view in views if view.activity.strip.letters.strip(UNSEEN)][:MOST]
    if not shown:
        return ""
    end = max(view.activity.strip.end for view in shown)
    start = max(min(view.activity.strip.start for view in shown), end - SECONDS)
    axis, wide = Axis(0.0, max(end - start, TICK), "seconds"), WIDTH - _LEFT - _RIGHT
    high = _ROW * len(shown)
    parts = [_head(high + 66, "phases of each rank"), f'<g transform="translate({_LEFT} 8)">']
    tick = wide / max(1.0, (end - start) / TICK)
    drawn: dict[str, list[str]] = {name: [] for name in LETTERS}
    for row, view in enumerate(shown):
        y = row * _ROW + _ROW // 2
        parts.append(f'<text x="-8" y="{y + 4}" text-anchor="end">{view.rank}</text>')
        for name, first, count in _runs(view.activity.strip.between(start, end).lower()):
            drawn[name].append(f"M{first * tick:.1f} {y}h{count * tick:.1f}")
    parts += [f'<path class="ph-strip ph-p-{name}" d="{"".join(path)}"/>' for name, path in drawn.items() if path]
    parts.append(_across(axis, wide, high + 2))
    x = 0.0
    for name in (name for name, path in drawn.items() if path):
        parts.append(f'<rect class="ph-p-{name}" x="{x:.0f}" y="{high + 36}" width="11" height="11"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{high + 46}">{name}</text>')
        x += 40 + len(name) * 6.6
    return "".join([*parts, "</g></svg>"])


def _runs(letters: str) -> list[tuple[str, int, int]]:
    """Return runs of equal letters as (phase, first index, length)."""
    names = {letter: name for name, letter in LETTERS.items()}
    runs: list[tuple[str, int, int]] = []
    for place, letter in enumerate(letters):
        name = names.get(letter)
        if name is None:
            continue
        if runs and runs[-1][0] == name and runs[-1][1] + runs[-1][2] == place:
            runs[-1] = (name, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((name, place, 1))
    return runs


def _head(height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ph" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{label}"><rect class="ph-paper" width="{WIDTH}" height="{height}"/>'
    )


def _across(axis: Axis, wide: int, y: int) -> str:
    parts = [f'<path class="ph-axis" d="M0 {y}H{wide}"/>']
    for value, text in axis.ticks(10):
        place = axis.at(value)
        if place is not None and 0 <= place <= 1:
            parts.append(f'<path class="ph-axis" d="M{place * wide:.1f} {y}v4"/>')
            parts.append(f'<text x="{place * wide:.1f}" y="{y + 17}" text-anchor="middle">{text}</text>')
    return "".join(parts)


def _text(text: str) -> str:
    return escape("".join(char if char.isprintable() else " " for char in text))
