"""What was measured: one cell for one operation of one backend at one size. It travels as a line of JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from phalanx.bench.comm import traffic

MARK = "phalanx-bench-comm "  # before a line of results among what ranks print

Key = tuple[int, str, str, str, int]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who was there."""

    ranks: int
    nodes: tuple[tuple[int, ...], ...]  # ranks of each
    hosts: tuple[str, ...]  # by rank
    devices: tuple[str, ...]  # by rank
    backends: tuple[str, ...]
    versions: dict[str, str] = {}


class Cell(msgspec.Struct, frozen=True, tag="cell"):
    """Seconds. Of all ranks it is the slowest whose times these are."""

    ranks: int
    operation: str
    dtype: str
    place: str  # "in", "out"
    size: int  # asked for; 0 where there is none
    bytes: int  # as nccl-tests count them
    backend: str
    rounds: tuple[float, ...] = ()  # mean time of one call, by round
    p50: float = 0.0
    p99: float = 0.0
    calls: int = 0
    wrong: int = 0  # elements, in all ranks
    failure: str = ""

    @property
    def key(self) -> Key:
        """Whom it can be compared with."""
        return (self.ranks, self.operation, self.dtype, self.place, self.size)

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds) if self.rounds else math.nan

    @property
    def algorithm(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.rounds else math.nan

    @property
    def bus(self) -> float:
        if self.operation == traffic.COPY:
            return self.algorithm
        return self.algorithm * traffic.bus_factor(self.operation, self.ranks)

    @property
    def noise(self) -> float:
        """What its time may be off by, as a share of it: twice a median's standard error, as the quartiles tell it."""
        return _error(self.rounds) / self.seconds if self.rounds else math.nan


class Link(msgspec.Struct, frozen=True, tag="link"):
    """From one rank to another."""

    ranks: int
    backend: str
    source: int
    target: int
    latency: float  # seconds, one way
    speed: float  # bytes a second
    near: bool  # on one node


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Training steps of DDP: seconds a step, by round."""

    ranks: int
    backend: str
    rounds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds) if self.rounds else math.nan


class Note(msgspec.Struct, frozen=True, tag="note"):
    ranks: int
    text: str


Word = Hello | Cell | Link | Steps | Note


def spoken(word: Word) -> str:
    return MARK + msgspec.json.encode(word).decode()


def heard(line: str) -> Word | None:
    """None: it is something else, or no whole word."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        found: Word = msgspec.json.decode(text, type=Word)
    except msgspec.MsgspecError:
        return None
    return found


class Results(msgspec.Struct):
    """Of one or several numbers of ranks."""

    hellos: list[Hello] = []
    cells: list[Cell] = []
    links: list[Link] = []
    steps: list[Steps] = []
    notes: list[Note] = []

    def add(self, word: Word) -> None:
        match word:
            case Hello():
                self.hellos.append(word)
            case Cell():
                self.cells.append(word)
            case Link():
                self.links.append(word)
            case Steps():
                self.steps.append(word)
            case Note():
                self.notes.append(word)

    @property
    def wrong(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.wrong]

    @property
    def measured(self) -> bool:
        """Whether something was measured of a backend."""
        done = any(cell.rounds for cell in self.cells if cell.operation != traffic.COPY)
        return done or bool(self.links) or any(one.rounds for one in self.steps)

    def cell(self, key: Key, backend: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.key == key and cell.backend == backend and cell.rounds), None)

    def copy(self, ranks: int, size: int, dtype: str, device: str) -> Cell | None:
        """Of the same size, in the same run."""
        key = (ranks, traffic.COPY, dtype, "out", size)
        return self.cell(key, device)

    def share(self, cell: Cell) -> float | None:
        """Of what memory, or the slowest link between nodes, can do; None where there is no such limit to tell."""
        least = self.least(cell)
        return least / cell.seconds if least and cell.rounds else None

    def least(self, cell: Cell) -> float | None:
        """Seconds that the operation must take, for what it has to move."""
        hello = next((hello for hello in self.hellos if hello.ranks == cell.ranks), None)
        if hello is None or cell.operation == traffic.COPY or not cell.size:
            return None
        apart = len(set(hello.nodes)) > 1
        device = "cuda" if hello.devices and device_of(cell.backend) == "cuda" else "cpu"
        if not apart and (device == "cpu" or cell.ranks == 1):
            copy = self.copy(cell.ranks, cell.size, cell.dtype, device)
            if copy is None:
                return None
            return traffic.passes(cell.operation, cell.ranks, cell.place) * copy.seconds * cell.bytes / copy.bytes
        # Between GPUs of a node every one has a link of its own.
        nodes, local = (len(hello.nodes), max(map(len, hello.nodes))) if apart else (cell.ranks, 1)
        of_kind = [link.speed for link in self.links if link.ranks == cell.ranks and link.backend == cell.backend]
        if apart:
            of_kind = [
                link.speed
                for link in self.links
                if (link.ranks, link.backend, link.near) == (cell.ranks, cell.backend, False)
            ]
        if not of_kind:
            return None
        return traffic.over_links(cell.operation, cell.bytes, cell.ranks, nodes, local) / min(of_kind)


def device_of(backend: str) -> str:
    """Where the tensors of a backend are: as it says ("cuda:gloo"), or as is usual for it."""
    device, colon, _ = backend.partition(":")
    return device if colon else "cuda" if backend in ("nccl", "ucc", "nvshmem") else "cpu"


def _error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    return 2 * 1.2533 * (high - low) / 1.349 / math.sqrt(len(ordered))
