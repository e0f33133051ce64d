"""The symbol and the style of each health state, in Unicode and in ASCII."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# health -> style (paint.py)
HEALTH_STYLES = {
    "starting": "dim",
    "healthy": "good",
    "waiting": "info",
    "slow": "warn",
    "debugged": "odd",
    "silent": "warn",
    "stuck": "bad",
    "dead": "bad",
    "stopped": "dim",
    "done": "dim",
}
# state of the run -> style
STATE_STYLES = {
    "done": "dim",
    "stopped": "dim",
    "gathering": "info",
    "starting": "info",
    "running": "good",
    "stalled": "bad",
    "recovering": "warn",
    "stopping": "warn",
    "failed": "bad",
}
# kind of event -> style
KINDS = {
    "joined": "info",
    "fault": "bad",
    "recovered": "good",
    "restarted": "warn",
    "stalled": "bad",
    "verdict": "bad",
    "resumed": "good",
    "slow": "warn",
    "preempted": "warn",
    "note": "",
    "end": "bold",
}


@dataclass(frozen=True)
class Signs:
    """The symbols of the screen."""

    health: Mapping[str, str] = field(
        default_factory=lambda: {
            "starting": "○",
            "healthy": "●",
            "waiting": "◐",
            "slow": "▼",
            "debugged": "◆",
            "silent": "?",
            "stuck": "■",
            "dead": "✗",
            "stopped": "□",
            "done": "✓",
        }
    )
    data: str = "▒"
    compute: str = "█"
    waiting: str = "░"
    empty: str = "·"
    rule: str = "─"
    dot: str = "·"
    chosen: str = "▸"
    dots: str = "…"
    ascii_only: bool = False


UNICODE = Signs()
ASCII = Signs(
    health={
        "starting": "o",
        "healthy": "*",
        "waiting": "~",
        "slow": "v",
        "debugged": "d",
        "silent": "?",
        "stuck": "#",
        "dead": "X",
        "stopped": "-",
        "done": "=",
    },
    data="d",
    compute="#",
    waiting="-",
    empty=".",
    rule="-",
    dot="-",
    chosen=">",
    dots="...",
    ascii_only=True,
)


def signs(environ: Mapping[str, str]) -> Signs:
    """Return the Unicode symbols if the locale supports them."""
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environ.get(name))), "")
    return UNICODE if "utf8" in locale.lower().replace("-", "") else ASCII
