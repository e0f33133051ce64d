"""A rank that waits for nobody, while others wait for it: what keeps it, by what its main thread does."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import msgspec

from phalanx.diagnose import words
from phalanx.diagnose.frames import What
from phalanx.diagnose.rank_state import LONGER, MEETINGS, Field, RankState, being, described, named, unstarted
from phalanx.diagnose.rules import children, data, gpu, leaving
from phalanx.diagnose.rules.process import lost_nodes
from phalanx.diagnose.verdict import Verdict

_ALONE = frozenset(
    {"lock", "input", "subprocess", "file", "socket", "store", "loader", "work"}
)  # a wait that nobody shares

_TIMEOUT = "give it a timeout"

# What it does -> the kind, what is to be said after the place, and what to do.
_KEPT: dict[What, tuple[str, str, str]] = {
    "lock": ("lock", "", "phalanx why --stacks shows what its other threads do"),
    "input": ("input", "", "no rank has a terminal to read from: give it the answer on the command line"),
    "sleep": ("sleep", "", ""),
    "subprocess": ("subprocess", "", _TIMEOUT),
    "file": ("file", "", ""),
    "socket": ("socket", "", _TIMEOUT),
    "store": ("store", ", which nobody has set", "every key that is waited for has to be set by some rank"),
    "work": ("message", "", "every irecv needs an isend of the other rank, and the other way round"),
}


def verdicts(field: Field, accused: Container[int]) -> Iterator[Verdict]:
    """Yield a verdict for each rank that keeps the others waiting and is not in `accused`."""
    yield from _never_came(field)
    away = {node.node for node in lost_nodes(field.evidence)}
    alike: dict[tuple[object, ...], list[RankState]] = {}
    for standing in field.of(roots(field)):
        if standing.number not in accused and standing.rank.node not in away:
            alike.setdefault(_likeness(field, standing), []).append(standing)
    for kept in alike.values():
        found = _judge(field, kept)
        if found is not None:
            yield found


def _likeness(field: Field, standing: RankState) -> tuple[object, ...]:
    """Ranks that are kept by the same are named together; DataLoaders have each their own workers."""
    rank = standing.rank
    alone = standing.number if standing.act.what == "loader" else None
    state = (standing.spins, slow(field, standing), standing.stuck, standing.unseen)
    return alone, standing.act, standing.place, standing.long, rank.busy, rank.ended, rank.note, *state


def roots(field: Field) -> set[int]:
    """Who keeps the others. Where nobody waits for anybody, those who stand still alone."""
    awaited = {rank for missing in field.awaits.values() for rank in missing}
    if awaited:
        return awaited - set(field.awaits)
    # While others go on, one that never had a pace has another part to play: a server, a watcher of the others.
    together = all(each.stuck or each.gone for each in field.standings.values())
    return {
        each.number
        for each in field.standings.values()
        if each.stuck and each.number not in field.awaits and not each.gone and not each.rank.busy
        and (together or each.rank.step >= 0)
        and (each.act.what in _ALONE or (overdue(field, each) and not each.works))
    }  # fmt: skip


def overdue(field: Field, standing: RankState) -> bool:
    """Even what computes, or writes a checkpoint, has taken too long."""
    limit = max(field.evidence.limit, 5 * standing.rank.usual)
    return max(standing.rank.since, field.evidence.waited) >= LONGER * limit


def slow(field: Field, standing: RankState) -> bool:
    """Return whether a rank makes progress and is only slow."""
    return standing.proceeds or (standing.moves and not overdue(field, standing))


def _judge(field: Field, kept: Sequence[RankState]) -> Verdict | None:
    standing = kept[0]
    if slow(field, standing) or not standing.stuck or standing.act.what == "debugger":
        return None
    if standing.leaving and (found := leaving.verdict(field, kept)) is not None:
        return found
    waiting = field.of(field.waiting_for([each.number for each in kept]))
    if waiting and all(each.call is None for each in waiting):
        return _late(field, kept, waiting)
    if standing.gone:
        return None
    if standing.unseen:
        note = f": {standing.rank.note}" if standing.rank.note else ""
        return _verdict(field, kept, "unknown", f"{_verb(kept, 'gives', 'give')} no sign{note}")
    return data.verdict(field, kept) or _kept(field, kept)


def _kept(field: Field, kept: Sequence[RankState]) -> Verdict:
    standing = kept[0]
    act, card = standing.act, standing.rank.gpu
    are, have = _verb(kept, "is", "are"), _verb(kept, "has", "have")
    time = words.duration(max(standing.rank.since, field.evidence.waited))
    if standing.long == "checkpoint":
        doing = f" ({act.words})" if act.words else ""
        return _verdict(field, kept, "checkpoint", f"{are} writing or reading a checkpoint{doing}")
    if act.what == "leaving":
        inside = "in destroy_process_group" if act.name == "destroy_process_group" else "at the end of its script"
        return _verdict(field, kept, "leaving", f"{are} {inside}", f", and {_verb(kept, 'does', 'do')} not end")
    if standing.long:
        doing = {"compile": "compiling", "import": "importing"}[standing.long]
        return _verdict(field, kept, standing.long, f"{have} been {doing} for {time}")
    behind = unstarted(standing.rank)
    if behind is not None:
        text = f"{_verb(kept, 'waits', 'wait')} for the GPU{gpu.use(card)}"
        return _verdict(
            field,
            kept,
            "gpu",
            text,
            f": a kernel does not end, and {named(standing, behind)} behind it has not started",
        )
    if act.what in _KEPT:
        kind, after, fix = _KEPT[act.what]
        awaited = children.awaited(standing.rank, act)
        first = f" ({awaited[0]})" if awaited and len(kept) == 1 else ""
        found = _verdict(field, kept, kind, f"{are} {act.words}{first}", after)
        fix = _TIMEOUT if awaited else fix
        return msgspec.structs.replace(found, fix=fix, details=(*awaited[len(first) > 0 :], *found.details))
    if act.what == "cuda" or (gpu.busy(card) and not standing.rank.busy):
        text = f"{_verb(kept, 'waits', 'wait')} for the GPU{gpu.use(card)}"
        return _verdict(field, kept, "gpu", text, "" if gpu.idle(card) else ": a kernel does not end")
    if (standing.spins or standing.rank.busy) and gpu.idle(card):
        text = (
            f"{_verb(kept, 'computes', 'compute')} on the CPU, or {_verb(kept, 'loops', 'loop')}, while the GPU is idle"
        )
        return _verdict(field, kept, "loop", f"{text}{gpu.use(card)}")
    if standing.spins or standing.rank.busy:
        return _verdict(
            field,
            kept,
            "loop",
            f"{_verb(kept, 'loops', 'loop')}, or {_verb(kept, 'computes', 'compute')} for very long,",
        )
    if act.what in MEETINGS:
        name = "init_process_group" if act.what == "join" else "new_group"
        return _verdict(field, kept, "join", f"{are} still in {name}")
    return _verdict(field, kept, "stands", f"{have} stood for {time}")


def everybody(field: Field) -> Iterator[Verdict]:
    """Nothing tells who is to blame, and still nothing moves."""
    alive = [each for each in field.of(field.standings) if not each.gone]
    if not alive or field.evidence.waited < field.evidence.limit:
        return
    if any(slow(field, each) or each.works or not each.stuck for each in alive):
        return
    if any(each.act.what == "debugger" for each in alive) or all(_unpaced(field, each) for each in alive):
        return
    alike: dict[tuple[object, ...], list[RankState]] = {}
    for each in alive:
        if each.number not in field.awaits and not each.unseen:
            alike.setdefault(_likeness(field, each), []).append(each)
    if sum(map(len, alike.values())) == len(alive):
        yield from (data.verdict(field, kept) or _kept(field, kept) for kept in alike.values())
        return
    yield Verdict(
        kind="stands",
        ranks=(),
        text=f"nothing has moved for {words.duration(field.evidence.waited)}, and nothing tells why: "
        f"rank {alive[0].number} is {being(alive[0])}",
        place=alive[0].place,
        certain=False,
    )


def _unpaced(field: Field, standing: RankState) -> bool:
    """It waits for nobody, and has no pace that it could have lost."""
    waits = standing.number in field.awaits or standing.call is not None or standing.act.what == "leaving"
    return not waits and standing.rank.step < 0 and not overdue(field, standing)


def _verb(kept: Sequence[RankState], one: str, several: str) -> str:
    return one if len(kept) == 1 else several


def _verdict(field: Field, kept: Sequence[RankState], kind: str, what: str, after: str = "") -> Verdict:
    ranks, place = tuple(each.number for each in kept), kept[0].place
    return Verdict(
        kind=kind,
        ranks=ranks,
        text=f"{words.who(ranks)} {what}{words.at(place)}{after}{field.wait_for(ranks)}",
        details=(*_line(kept[0]), *(() if kind == "loop" else data.idle_gpu(kept[0]))),
        place=place,
        certain=False,
    )


def _line(standing: RankState) -> tuple[str, ...]:
    place = standing.place
    return (f"its line: {place.source}",) if place is not None and place.source else ()


def _late(field: Field, kept: Sequence[RankState], waiting: Sequence[RankState]) -> Verdict:
    """Where everybody has to come, they have not."""
    standing, ranks, others = kept[0], tuple(each.number for each in kept), [each.number for each in waiting]
    where = "init_process_group" if waiting[0].act.what == "join" else "new_group"
    ended = standing.rank.ended
    doing = words.exit_text(ended) if ended is not None else described(standing)
    if standing.unseen:
        doing = standing.rank.note or "no sign of it"
    return Verdict(
        kind="join",
        ranks=ranks,
        text=f"{words.who(ranks)} {_verb(kept, 'has', 'have')} not come to {where} ({doing}); "
        f"{words.others(others, field.evidence, ranks)} {words.verb(others, 'waits', 'wait')} "
        f"for {words.verb(ranks, 'it', 'them')}{words.at(waiting[0].place)}",
        place=standing.place,
        certain=ended is not None,
    )


def _never_came(field: Field) -> Iterator[Verdict]:
    """Ranks of which nothing at all is known."""
    joining = [each for each in field.of(field.awaits) if each.act.what == "join" and each.call is None]
    missing = sorted({rank for each in joining for rank in field.awaits[each.number]} - set(field.standings))
    if not missing:
        return
    here = [each.number for each in joining]
    yield Verdict(
        kind="join",
        ranks=tuple(missing),
        text=f"{words.who(missing)} of {field.evidence.world_size} {words.verb(missing, 'has', 'have')} never come: "
        f"{words.who(here)} {words.verb(here, 'waits', 'wait')} in {described(joining[0])}",
        place=joining[0].place,
    )
