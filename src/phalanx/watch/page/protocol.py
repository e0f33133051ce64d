"""What the page is told, as JSON: everything at first, then what has changed.

GET /live is a stream of server-sent events: `whole` once, then `update` each time that anything happens; both carry
an `Update`. Its `at` is when the newest event in it happened, so that a browser on this machine can tell how late its
picture is.
"""

from __future__ import annotations

import msgspec


class RankRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=False):
    """A rank, as `RankView`. In a whole, all of them; in an update, those that have changed."""

    rank: int
    node: int
    host: str
    device: str
    pid: int
    health: str
    phase: str
    step: int
    rate: float
    samples: float
    data: float
    compute: float
    waiting: float
    cpu: float
    memory: int
    gpu: float
    gpu_memory: int
    silent: float
    place: str


class Head(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    command: str
    state: str
    started: float
    now: float
    ended: float | None
    code: int | None
    world_size: int
    nodes: int
    generation: int
    attempt: int
    step: int
    total: int
    epoch: int
    rate: float
    samples: float
    goodput: float
    lost: float
    left: float | None  # seconds, where that is known


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A TimelineEvent."""

    time: float
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0


class PageUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at: float
    head: Head
    rows: tuple[RankRow, ...] = ()
    gone: tuple[int, ...] = ()  # ranks that are no more
    strips: dict[int, tuple[float, str]] = {}  # new letters of a rank, and when the first of them begins
    curves: dict[str, list[tuple[int, float, float]]] = {}  # new points: step, time, value
    told: tuple[Told, ...] = ()  # new happenings
    verdicts: tuple[Told, ...] = ()  # that stand now: all of them, each time
    held: tuple[tuple[int, float, str], ...] = ()  # rank that others wait for, share of the last minute, its phase
    roll: dict[str, object] | None = None  # RollCall, as long as it is called
    links: tuple[tuple[str, str, float, float, float], ...] = ()  # one, other, latency, there, back; when they change
    measured: float = 0.0  # when they were
