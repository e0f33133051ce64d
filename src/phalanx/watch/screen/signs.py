"""What stands for what: a sign for every health beside its colour, in Unicode and in ASCII."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# health or state -> style (paint.py)
STYLES = {
    "coming": "dim",
    "well": "good",
    "waiting": "info",
    "slow": "warn",
    "debugged": "odd",
    "silent": "warn",
    "stuck": "bad",
    "dead": "bad",
    "stopped": "dim",
    "done": "dim",
    "gathering": "info",
    "starting": "info",
    "running": "good",
    "stalled": "bad",
    "recovering": "warn",
    "stopping": "warn",
    "failed": "bad",
}
# of happenings
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
    health: Mapping[str, str] = field(
        default_factory=lambda: {
            "coming": "○",
            "well": "●",
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
        "coming": "o",
        "well": "*",
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
    """Unicode where the locale has it."""
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environ.get(name))), "")
    return UNICODE if "utf8" in locale.lower().replace("-", "") else ASCII
