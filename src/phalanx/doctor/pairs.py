"""Pairs of nodes: when each pair is measured, and which links are slower than the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import listed, seconds, several, size, speed

CHECK = "links"
_SLOWER = 3.0
_NOTICEABLE = 0.0005  # seconds: smaller differences are measurement noise
_POOR = 12.5e6  # bytes per second: a network of 100 Mbit/s
_FAR = 0.005
_ALONE = 8  # up to this number of nodes, pairs are measured one at a time


@dataclass(frozen=True)
class HostPair:
    """A link between two nodes, as gloo uses it."""

    one: str
    other: str
    latency: float  # seconds, one way
    there: float  # bytes per second
    back: float
    local: bool = False  # both are on one machine

    @property
    def slowest(self) -> float:
        """The lower bandwidth of both directions."""
        return min(self.there, self.back)

    def __str__(self) -> str:
        return f"{self.one} – {self.other}"


@dataclass(frozen=True)
class Collective:
    """One measured collective."""

    name: str
    backend: str
    ranks: int
    bytes: int
    seconds: float
    right: bool = True  # whether the result was correct

    @property
    def bus(self) -> float:
        """Bus bandwidth: bytes per second over the link of each rank, independent of the number of ranks."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.seconds if self.seconds else 0.0


def rounds(count: int, alone: int = _ALONE) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs to measure at the same time: one pair each, or with many nodes each node once."""
    if count <= alone:
        return [[(one, other)] for one in range(count) for other in range(one + 1, count)]
    # Round-robin tournament (circle method): the first stays in place, the others rotate by one position per round.
    table: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(table) // 2
    found = []
    for _ in range(len(table) - 1):
        matches = zip(table[:half], reversed(table[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None])
        table = [table[0], table[-1], *table[1:-1]]
    return found


def judge(pairs: Sequence[HostPair]) -> list[Finding]:
    """Return findings about the links."""
    if not pairs:
        return []
    real = [pair for pair in pairs if not pair.local]
    found = [*_slow(real), *_uneven(real)]
    found = found or [*_poor(real)]  # with few links, one bad link can make the median look poor
    return found or [Finding(CHECK, "green", _summary(pairs, local=not real))]


def doubtful(pairs: Sequence[HostPair]) -> list[HostPair]:
    """Return the pairs that would be reported."""
    real = [pair for pair in pairs if not pair.local]
    bad = [*_by_speed(real), *_by_latency(real)]
    return [pair for pair in real if pair in bad or _is_uneven(pair)]


def _by_speed(pairs: Sequence[HostPair]) -> list[HostPair]:
    return [pair for pair in pairs if pair.slowest * _SLOWER < _others(pairs, pair, "slowest")]


def _by_latency(pairs: Sequence[HostPair]) -> list[HostPair]:
    return [
        pair
        for pair in pairs
        if pair.latency > _SLOWER * (usual := _others(pairs, pair, "latency")) > 0
        and pair.latency - usual > _NOTICEABLE
    ]


def _is_uneven(pair: HostPair) -> bool:
    return max(pair.there, pair.back) > _SLOWER * pair.slowest


def _slow(pairs: Sequence[HostPair]) -> Iterator[Finding]:
    cause = "a bad cable or port, a link that fell back to a lower speed, or traffic of others"
    for slow, what in ((_by_speed(pairs), "slowest"), (_by_latency(pairs), "latency")):
        if not slow:
            continue
        say = speed if what == "slowest" else seconds
        usual = statistics.median([getattr(pair, what) for pair in pairs if pair not in slow] or [0.0])
        node = _common(slow, pairs)
        if node:
            value = statistics.median([getattr(pair, what) for pair in slow])
            word = "slow" if what == "slowest" else "late"
            fact = f"all links of {node} are {word}: {say(value)}, the others have {say(usual)}"
            yield Finding(CHECK, "yellow", fact, cause, f"on {node}: ethtool INTERFACE; ip -s link", node)
            continue
        for pair in slow:
            fact = f"{pair}: {say(getattr(pair, what))}, the others have {say(usual)}"
            yield Finding(CHECK, "yellow", fact, cause, "ethtool INTERFACE and ip -s link on both nodes")


def _others(pairs: Sequence[HostPair], pair: HostPair, what: str) -> float:
    others = [getattr(other, what) for other in pairs if other is not pair]
    return statistics.median(others) if others else 0.0


def _common(slow: Sequence[HostPair], pairs: Sequence[HostPair]) -> str:
    """Return the node whose links are exactly the slow ones, if there is one."""
    for node in {slow[0].one, slow[0].other}:
        links = [pair for pair in pairs if node in (pair.one, pair.other)]
        if len(links) > 1 and len(links) == len(slow) and all(pair in links for pair in slow):
            return node
    return ""


def _uneven(pairs: Sequence[HostPair]) -> Iterator[Finding]:
    known = _by_speed(pairs)  # these are already reported
    for pair in pairs:
        if _is_uneven(pair) and pair not in known:
            slow, fast = sorted(((pair.there, pair.one, pair.other), (pair.back, pair.other, pair.one)))
            yield Finding(
                CHECK,
                "yellow",
                f"{slow[1]} to {slow[2]}: {speed(slow[0])}, but {speed(fast[0])} the other way",
                "a bad cable, or two ends that do not agree on the speed of a link",
                f"ethtool INTERFACE on {pair.one} and {pair.other}",
            )


def _poor(pairs: Sequence[HostPair]) -> Iterator[Finding]:
    usual = statistics.median([pair.slowest for pair in pairs] or [_POOR])
    if usual < _POOR:
        yield Finding(
            CHECK,
            "yellow",
            f"the network carries {speed(usual)}",
            "slower than 100 Mbit/s: gradients of a model of any size will take longer than computing them",
            "ip route get ADDRESS; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another interface",
        )
    late = statistics.median([pair.latency for pair in pairs] or [0.0])
    if late > _FAR:
        yield Finding(
            CHECK,
            "yellow",
            f"a message takes {seconds(late)} from node to node",
            "the nodes are far apart, or the network is busy",
            "take nodes that are closer together",
        )


def _summary(pairs: Sequence[HostPair], *, local: bool) -> str:
    late = sorted(pair.latency for pair in pairs)
    fast = sorted(pair.slowest for pair in pairs)
    text = f"{several(len(pairs), 'pair')}: {_span(late, seconds)}, {_span(fast, speed)}"
    return text + (" (on one machine: it shows that ranks can talk, not how fast a network is)" if local else "")


def _span(values: Sequence[float], say: Callable[[float], str]) -> str:
    first, last = say(values[0]), say(values[-1])
    return first if first == last else f"{first} to {last}"


def judge_collectives(collectives: Sequence[Collective]) -> list[Finding]:
    """Return findings about the measured collectives."""
    wrong = [one for one in collectives if not one.right]
    found = [
        Finding(
            "all_reduce",
            "red",
            f"{one.name} of {size(one.bytes)} over {one.backend} gave a wrong sum",
            "a broken card or memory: nothing that is computed here can be trusted",
            "repeat with fewer nodes until the faulty one is known",
        )
        for one in wrong
    ]
    if collectives and not wrong:
        large = [one for one in collectives if one.bytes > 1 << 16]
        parts = [
            f"{one.backend}, {several(one.ranks, 'rank')}: {size(one.bytes)} in {seconds(one.seconds)}, "
            f"{speed(one.bus)} a link"
            for one in large
        ]
        small = [f"{one.backend} {seconds(one.seconds)} for a few bytes" for one in collectives if one not in large]
        found.append(Finding("all_reduce", "green", "; ".join([*parts, listed(small)] if small else parts)))
    return found
