"""The JSON that the page receives: the whole state first, then changes.

GET /live is a stream of server-sent events: `whole` once, then `update` after each change. Both carry a `PageUpdate`.
Its `at` is the time of the newest event in it: a browser on the same machine can compute the latency.
"""

from __future__ import annotations

import msgspec

from phalanx.contract.run_metadata import RunMetadata


class RankRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=False):
    """A rank, as `RankView`. `whole` contains all ranks, `update` only those that have changed.

    Flat, because it is a row of a table: an array on the wire, whose columns the page reads by position.
    """

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
    """The state of the run as a whole. Flat, because the page and stored reports read these fields by name."""

    run: str
    command: str
    state: str
    ending: str  # how it ended, if it has: "failed (exit code 1)", "stopped by Ctrl-C"
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
    epoch: int  # from 1; 0: unknown
    epochs: int  # 0: unknown
    rate: float
    samples: float
    goodput: float
    lost: float
    eta: float | None  # seconds; None: unknown


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A `TimelineEvent`."""

    time: float
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0


class PageUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole state, or the changes."""

    at: float
    head: Head
    rows: tuple[RankRow, ...] = ()
    gone: tuple[int, ...] = ()  # ranks that no longer exist
    strips: dict[int, tuple[float, str]] = {}  # rank -> start time of the new letters, and the letters
    curves: dict[str, list[tuple[int, float, float]]] = {}  # new points: step, time, value
    events: tuple[TimelineEntry, ...] = ()  # new ones
    verdicts: tuple[TimelineEntry, ...] = ()  # all current verdicts, every time
    stragglers: tuple[tuple[int, float, str], ...] = ()  # rank, share of the last minute that others waited, phase
    rendezvous: dict[str, object] | None = None  # RendezvousProgress, while nodes are missing
    links: tuple[tuple[str, str, float, float, float], ...] = ()  # one, other, latency, there, back; when they change
    metadata: RunMetadata | None = None  # hyperparameters, commit, versions, machine; when they change
    measured: float = 0.0  # when the links were measured
