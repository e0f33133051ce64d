"""CommResults: one measurement per operation, backend and size. Ranks send them as lines of JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.comm import traffic
from benchmarks.common.ratios import median_error

PREFIX = "phalanx-bench-comm "  # marks a line of results in the output of the ranks

Key = tuple[int, str, str, str, int]


class WorldInfo(msgspec.Struct, frozen=True, tag="hello"):
    """The ranks that take part, and their backends."""

    ranks: int
    nodes: tuple[tuple[int, ...], ...]  # ranks of each node
    hosts: tuple[str, ...]  # by rank
    devices: tuple[str, ...]  # by rank
    backends: tuple[str, ...]
    versions: dict[str, str] = {}


class Measurement(msgspec.Struct, frozen=True, tag="cell"):
    """The times of one operation in seconds, each of the slowest rank."""

    ranks: int
    operation: str
    dtype: str
    place: str  # "in", "out"
    size: int  # requested; 0 for a barrier
    bytes: int  # as nccl-tests count them
    backend: str
    rounds: tuple[float, ...] = ()  # mean time of a call, by round
    p50: float = 0.0
    p99: float = 0.0
    calls: int = 0
    wrong: int = 0  # wrong elements in all ranks
    failure: str = ""

    @property
    def key(self) -> Key:
        """What comparable measurements have in common."""
        return (self.ranks, self.operation, self.dtype, self.place, self.size)

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds) if self.rounds else math.nan

    @property
    def algorithm(self) -> float:
        """Algorithm bandwidth in bytes per second."""
        return self.bytes / self.seconds if self.rounds else math.nan

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes per second."""
        if self.operation == traffic.COPY:
            return self.algorithm
        return self.algorithm * traffic.bus_factor(self.operation, self.ranks)

    @property
    def noise(self) -> float:
        """The relative error of `seconds`: half of its 95 % confidence interval."""
        return median_error(self.rounds) / self.seconds if self.rounds else math.nan


class Link(msgspec.Struct, frozen=True, tag="link"):
    """Latency and bandwidth from one rank to another."""

    ranks: int
    backend: str
    source: int
    target: int
    latency: float  # seconds, one way
    speed: float  # bytes per second
    same_node: bool


class DdpSteps(msgspec.Struct, frozen=True, tag="steps"):
    """Training steps of DDP: seconds per step, by round."""

    ranks: int
    backend: str
    rounds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds) if self.rounds else math.nan


class CommNote(msgspec.Struct, frozen=True, tag="note"):
    """Something that was not measured, and why."""

    ranks: int
    text: str


Message = WorldInfo | Measurement | Link | DdpSteps | CommNote


def encode(message: Message) -> str:
    """Return a message as one line of output."""
    return PREFIX + msgspec.json.encode(message).decode()


def decode(line: str) -> Message | None:
    """Return the message of an output line, or None if the line is something else."""
    _, mark, text = line.partition(PREFIX)
    if not mark:
        return None
    try:
        found: Message = msgspec.json.decode(text, type=Message)
    except msgspec.MsgspecError:
        return None
    return found


class CommResults(msgspec.Struct):
    """All results, for one or several numbers of ranks."""

    worlds: list[WorldInfo] = []
    measurements: list[Measurement] = []
    links: list[Link] = []
    steps: list[DdpSteps] = []
    notes: list[CommNote] = []

    def add(self, message: Message) -> None:
        """Add a message of the ranks."""
        match message:
            case WorldInfo():
                self.worlds.append(message)
            case Measurement():
                self.measurements.append(message)
            case Link():
                self.links.append(message)
            case DdpSteps():
                self.steps.append(message)
            case CommNote():
                self.notes.append(message)

    @property
    def wrong(self) -> list[Measurement]:
        """The measurements with wrong results."""
        return [measurement for measurement in self.measurements if measurement.wrong]

    @property
    def measured(self) -> bool:
        """Whether any backend was measured."""
        done = any(measurement.rounds for measurement in self.measurements if measurement.operation != traffic.COPY)
        return done or bool(self.links) or any(one.rounds for one in self.steps)

    def find(self, key: Key, backend: str) -> Measurement | None:
        """Return the successful measurement of a backend with this key."""
        return next(
            (one for one in self.measurements if one.key == key and one.backend == backend and one.rounds), None
        )

    def copy(self, ranks: int, size: int, dtype: str, device: str) -> Measurement | None:
        """Return the memory copy of the same size in the same run."""
        key = (ranks, traffic.COPY, dtype, "out", size)
        return self.find(key, device)

    def share(self, measurement: Measurement) -> float | None:
        """Return the share of the limit of memory or of the slowest link; None if that limit is unknown."""
        least = self.least(measurement)
        return least / measurement.seconds if least and measurement.rounds else None

    def least(self, measurement: Measurement) -> float | None:
        """Return the least seconds that an operation needs to move its bytes."""
        world = next((world for world in self.worlds if world.ranks == measurement.ranks), None)
        if world is None or measurement.operation == traffic.COPY or not measurement.size:
            return None
        apart = len(set(world.nodes)) > 1
        device = "cuda" if world.devices and device_of(measurement.backend) == "cuda" else "cpu"
        if not apart and (device == "cpu" or measurement.ranks == 1):
            copy = self.copy(measurement.ranks, measurement.size, measurement.dtype, device)
            if copy is None:
                return None
            return (
                traffic.passes(measurement.operation, measurement.ranks, measurement.place)
                * copy.seconds
                * measurement.bytes
                / copy.bytes
            )
        # Each GPU of a node has its own link.
        nodes, local = (len(world.nodes), max(map(len, world.nodes))) if apart else (measurement.ranks, 1)
        of_kind = [
            link.speed for link in self.links if link.ranks == measurement.ranks and link.backend == measurement.backend
        ]
        if apart:
            of_kind = [
                link.speed
                for link in self.links
                if (link.ranks, link.backend, link.same_node) == (measurement.ranks, measurement.backend, False)
            ]
        if not of_kind:
            return None
        return traffic.over_links(measurement.operation, measurement.bytes, measurement.ranks, nodes, local) / min(
            of_kind
        )


def device_of(backend: str) -> str:
    """Return the device type of a backend's tensors: from its name ("cuda:gloo"), or its default."""
    device, colon, _ = backend.partition(":")
    return device if colon else "cuda" if backend in ("nccl", "ucc", "nvshmem") else "cpu"


# -- slow links

SLOW = 0.5  # of the median of its kind
_KIND = 3  # links that are enough for a median


@dataclass(frozen=True)
class SlowLink:
    """A link that is slower than others of its kind."""

    link: Link
    usual: float  # bytes per second: the median of its kind

    def text(self, world: WorldInfo | None) -> str:
        """Return a sentence that names both ends."""
        link = self.link
        ends = [_place(rank, world) for rank in (link.source, link.target)]
        kind = "on one node" if link.same_node else "between nodes"
        return (
            f"{link.backend}, {link.ranks} ranks: the link from {ends[0]} to {ends[1]} is slow: "
            f"{link.speed / 1e9:.2f} GB/s, while the median {kind} is {self.usual / 1e9:.2f}"
        )


def slow_links(links: Sequence[Link]) -> list[SlowLink]:
    """Return the links below half of the median of their kind: on one node, or between nodes."""
    kinds: dict[tuple[int, str, bool], list[Link]] = {}
    for link in links:
        kinds.setdefault((link.ranks, link.backend, link.same_node), []).append(link)
    found = []
    for of_kind in kinds.values():
        if len(of_kind) < _KIND:
            continue
        usual = statistics.median(link.speed for link in of_kind)
        found += [SlowLink(link, usual) for link in of_kind if link.speed < SLOW * usual]
    return found


def _place(rank: int, world: WorldInfo | None) -> str:
    if world is None or len(world.nodes) < 2 or rank >= len(world.hosts):
        return f"rank {rank}"
    return f"rank {rank} ({world.hosts[rank]})"
