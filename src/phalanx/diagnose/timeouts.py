"""A collective, barrier or store that timed out: from its message and the evidence of all ranks to who did not come.

The rank that gets the timeout is the victim. Evidence shows it as waiting where it gave up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from phalanx.diagnose import words
from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.standing import MEETINGS, PATIENCE, Field, Standing, being, described, survey
from phalanx.diagnose.verdict import Verdict

_WAITED = 30.0  # seconds, where the message does not say


@dataclass(frozen=True)
class Timeout:
    """What the message says."""

    seconds: float = 0.0  # 0: not said
    ranks: tuple[int, ...] = ()  # who did not come, by number in the group
    key: str = ""  # of the store
    address: str = ""  # of a store that did not answer: host:port
    op: str = ""  # NCCL's watchdog names the collective
    seq: int = 0
    group: str = ""


_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"Timed out waiting (?P<ms>\d+) ?ms for (recv|send) operation",  # gloo
        r"Ranks? (?P<ranks>\d+(, ?\d+)*) failed to pass monitoredBarrier in (?P<ms>\d+) ?ms",
        r"Rank \d+ timed out in monitoredBarrier after (?P<ms>\d+) ?ms",
        r"wait timeout after (?P<ms>\d+) ?ms, keys: (?P<key>\S+)",  # the store
        r"Timed out after (?P<s>\d+) seconds waiting for clients",
        r"socket has timed out after (?P<ms>\d+) ?ms while trying to connect to \((?P<host>[^,]+), (?P<port>\d+)\)",
        r"\bLate: .*\branks? (?P<ranks>\d+(?:(?:, | and )\d+)*)(?: \(.*?\))? did not come within "
        r"the timeout of (?P<s>[\d.]+) s",
        r"\bLate: ",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+),"
        r".*?Timeout\(ms\)=(?P<ms>\d+)",
    )
)
_GUID = re.compile(r"PG GUID (?P<group>[^\s()\]]+)")
_NCCL = {  # as its watchdog calls them
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}


def read(text: str) -> Timeout | None:
    """None: it is no timeout of torch.distributed, nor of our own groups."""
    found = next((match for pattern in _PATTERNS if (match := pattern.search(text))), None)
    if found is None:
        return None
    said = found.groupdict()
    seconds = float(said["ms"]) / 1000 if said.get("ms") else float(said.get("s") or 0)
    guid = _GUID.search(text) if said.get("op") else None
    op = said.get("op") or ""
    return Timeout(
        seconds=seconds,
        ranks=tuple(map(int, re.findall(r"\d+", said.get("ranks") or ""))),
        key=(said.get("key") or "").rpartition("//")[2] or (said.get("key") or ""),
        address=f"{said['host']}:{said['port']}" if said.get("port") else "",
        op=_NCCL.get(op, op.lower()),
        seq=int(said.get("seq") or 0),
        group=guid["group"] if guid else "",
    )


def timed_out(text: str) -> bool:
    return read(text) is not None


def blame(evidence: Evidence, late: int, timeout: Timeout) -> list[str]:
    """Who did not come, and where it was: one sentence, then what shows it and what to do. Empty: nobody can tell."""
    field = survey(_as_stuck(evidence, timeout))
    victim = field.standings.get(late)
    if victim is None:
        return []
    verdicts = diagnose(field.evidence)
    certain = next((verdict for verdict in verdicts if verdict.certain and verdict.kind != "exited"), None)
    if certain is not None:
        return [certain.text, *certain.details, *([f"fix: {certain.fix}"] if certain.fix else [])]
    missing = _missing(field, victim, timeout)
    if not missing:
        return _nobody(field, victim, timeout)
    groups = _together(missing)
    first = groups[0]
    text = f"{words.who(_numbers(first))} did not come{_whither(victim, timeout)}: {_being(first)}"
    more = [f"{words.who(_numbers(group))}: {_being(group)}" for group in groups[1:4]]
    return [text, *more, *_shown(first, verdicts)]


def _whither(victim: Standing, timeout: Timeout) -> str:
    seconds = words.duration(timeout.seconds) if timeout.seconds else ""
    if victim.call is not None or victim.act.what in MEETINGS:
        return f" to {described(victim)}{f' within {seconds}' if seconds else ''}"
    return f"; rank {victim.number} waited{words.at(victim.place)}{f' for {seconds}' if seconds else ''}"


def _as_stuck(evidence: Evidence, timeout: Timeout) -> Evidence:
    """However short the timeout was, and however long the steps of a rank take, its peer has not waited for it."""
    waited = max(evidence.waited, timeout.seconds or _WAITED, PATIENCE)
    ranks = tuple(msgspec.structs.replace(rank, usual=0.0, since=max(rank.since, waited)) for rank in evidence.ranks)
    return msgspec.structs.replace(evidence, waited=waited, ranks=ranks)


def _missing(field: Field, victim: Standing, timeout: Timeout) -> list[Standing]:
    """Whoever keeps the victim: those that wait for nobody, as far as they are among the missing."""
    awaited = field.awaits.get(victim.number, frozenset())
    if not awaited and timeout.ranks and not timeout.key:
        awaited = frozenset(timeout.ranks) - {victim.number}
    roots, seen, ahead = set[int](), {victim.number}, list(awaited)
    while ahead:  # a missing rank may wait for another itself
        rank = ahead.pop()
        if rank not in seen:
            seen.add(rank)
            further = field.awaits.get(rank, frozenset())
            ahead += further
            roots |= set() if further else {rank}
    return field.of(roots or awaited)


def _nobody(field: Field, victim: Standing, timeout: Timeout) -> list[str]:
    """Nobody is missing by the evidence: a key of the store that no rank has set, or what lies between them."""
    if not timeout.key or victim.act.what in MEETINGS:
        return []
    others = [each for each in field.of(field.standings) if each.number != victim.number]
    where = f"rank {victim.number} waited for{words.at(victim.place)}"
    text = f"no rank set the key {timeout.key!r} that {where} within {words.duration(timeout.seconds)}"
    return [text, *(f"{words.who(_numbers(group))}: {_being(group)}" for group in _together(others)[:4])]


def _together(standings: Sequence[Standing]) -> list[list[Standing]]:
    """Those that are at the same place, and do the same there."""
    groups: dict[str, list[Standing]] = {}
    for each in standings:
        groups.setdefault(_doing(each), []).append(each)
    return list(groups.values())


def _numbers(group: Sequence[Standing]) -> list[int]:
    return [each.number for each in group]


def _being(group: Sequence[Standing]) -> str:
    subject = words.verb(_numbers(group), "it", "they")
    gone = group[0].rank.ended is not None
    return f"{subject} {'' if gone else words.verb(_numbers(group), 'was ', 'were ')}{_doing(group[0])}"


def _doing(standing: Standing) -> str:
    if standing.rank.ended is not None:
        return words.exit_text(standing.rank.ended)
    if standing.unseen:
        return f"not to be seen ({standing.rank.note})" if standing.rank.note else "not to be seen"
    state = {"T": "stopped (SIGSTOP) ", "t": "held by a tracer "}.get(
        standing.rank.process.state if standing.rank.process else "", ""
    )
    return f"{state}{being(standing)}"


def _shown(group: Sequence[Standing], verdicts: Sequence[Verdict]) -> list[str]:
    """The line itself, and what is known of the wait."""
    numbers = set(_numbers(group))
    found = next((verdict for verdict in verdicts if numbers & set(verdict.ranks)), None)
    if found is not None:
        return [*found.details[:4], *([f"fix: {found.fix}"] if found.fix else [])]
    place = group[0].place
    return [f"its line: {place.source}"] if place is not None and place.source else []
