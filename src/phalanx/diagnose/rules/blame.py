"""Ranks that do not wait while others wait for them: what their main threads do."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import msgspec

from phalanx.diagnose import words
from phalanx.diagnose.description import being, described, named
from phalanx.diagnose.frames import What
from phalanx.diagnose.rank_state import LONGER, MEETINGS, RankState, only_late, unstarted
from phalanx.diagnose.rules import children, data, gpu, leaving
from phalanx.diagnose.rules.process import lost_nodes
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph, awaited_by

_ALONE = frozenset(
    {"lock", "input", "subprocess", "file", "socket", "store", "loader", "work"}
)  # waits that involve no other rank

_TIMEOUT = "give it a timeout"

# Activity -> kind of the verdict, text after the place, fix.
_KEPT: dict[What, tuple[str, str, str]] = {
    "lock": ("lock", "", "phalanx why --stacks shows what its other threads do"),
    "input": ("input", "", "no rank has a terminal to read from: give it the answer on the command line"),
    "sleep": ("sleep", "", ""),
    "subprocess": ("subprocess", "", _TIMEOUT),
    "file": ("file", "", ""),
    "socket": ("socket", "", _TIMEOUT),
    "store": ("store", ", which no rank has set", "every key that is waited for has to be set by some rank"),
    "work": ("message", "", "every irecv needs an isend of the other rank, and the other way round"),
}


def verdicts(graph: WaitGraph, accused: Container[int]) -> Iterator[Verdict]:
    """Yield a verdict for each rank that keeps the others waiting and is not in `accused`."""
    yield from _never_came(graph)
    away = {node.node for node in lost_nodes(graph.evidence)}
    alike: dict[tuple[object, ...], list[RankState]] = {}
    for state in graph.of(roots(graph)):
        if state.number not in accused and state.rank.node not in away:
            alike.setdefault(_likeness(graph, state), []).append(state)
    for kept in alike.values():
        found = _judge(graph, kept)
        if found is not None:
            yield found


def _likeness(graph: WaitGraph, state: RankState) -> tuple[object, ...]:
    """Return a key that is equal for ranks that one verdict can name. Each DataLoader has its own workers, so its rank
    gets its own key.
    """
    rank = state.rank
    alone = state.number if state.act.what == "loader" else None
    flags = (state.spins, slow(graph, state), state.stuck, state.unseen)
    return alone, state.act, state.place, state.long, rank.busy, rank.ended, rank.note, *flags


def roots(graph: WaitGraph) -> set[int]:
    """Return the ranks that keep the others waiting. If no rank waits for another: those that are stuck alone."""
    awaited = awaited_by(graph.awaits.values())
    if awaited:
        found = awaited - set(graph.awaits)
        return {rank for rank in found if not _is_late(graph, rank)} or found
    # While other ranks make progress, a rank that never had steps has another role, such as a server or a monitor.
    together = all(each.stuck or each.gone for each in graph.states.values())
    return {
        each.number
        for each in graph.states.values()
        if each.stuck and each.number not in graph.awaits and not each.gone and not each.rank.busy
        and (together or each.rank.step >= 0)
        and (each.act.what in _ALONE or (overdue(graph, each) and not each.works))
    }  # fmt: skip


def _is_late(graph: WaitGraph, rank: int) -> bool:
    return rank in graph.states and only_late(graph.evidence, graph.states[rank])


def overdue(graph: WaitGraph, state: RankState) -> bool:
    """Return whether a rank has taken too long even for computing or writing a checkpoint."""
    limit = max(graph.evidence.limit, 5 * state.rank.usual)
    return max(state.rank.since, graph.evidence.waited) >= LONGER * limit


def slow(graph: WaitGraph, state: RankState) -> bool:
    """Return whether a rank makes progress and is only slow."""
    return state.proceeds or (state.moves and not overdue(graph, state))


def _judge(graph: WaitGraph, kept: Sequence[RankState]) -> Verdict | None:
    state = kept[0]
    if slow(graph, state) or not state.stuck or state.act.what == "debugger":
        return None
    if state.leaving and (found := leaving.verdict(graph, kept)) is not None:
        return found
    waiting = graph.of(graph.waiting_for([each.number for each in kept]))
    if waiting and all(each.call is None for each in waiting):
        return _late(graph, kept, waiting)
    if state.gone:
        return None
    if state.unseen:
        note = f": {state.rank.note}" if state.rank.note else ""
        return _verdict(graph, kept, "unknown", f"{_verb(kept, 'does', 'do')} not respond{note}")
    return data.verdict(graph, kept) or _kept(graph, kept)


def _kept(graph: WaitGraph, kept: Sequence[RankState]) -> Verdict:
    state = kept[0]
    act, card = state.act, state.rank.gpu
    are, have = _verb(kept, "is", "are"), _verb(kept, "has", "have")
    time = words.duration(max(state.rank.since, graph.evidence.waited))
    if state.long == "checkpoint":
        doing = f" ({act.words})" if act.words else ""
        return _verdict(graph, kept, "checkpoint", f"{are} writing or reading a checkpoint{doing}")
    if act.what == "leaving":
        inside = "in destroy_process_group" if act.name == "destroy_process_group" else "at the end of its script"
        return _verdict(graph, kept, "leaving", f"{are} {inside}", f", and {_verb(kept, 'does', 'do')} not end")
    if state.long:
        doing = {"compile": "compiling", "import": "importing"}[state.long]
        return _verdict(graph, kept, state.long, f"{have} been {doing} for {time}")
    behind = unstarted(state.rank)
    if behind is not None:
        text = f"{_verb(kept, 'waits', 'wait')} for the GPU{gpu.use(card)}"
        return _verdict(
            graph,
            kept,
            "gpu",
            text,
            f": a kernel does not end, and {named(state, behind)} behind it has not started",
        )
    if act.what in _KEPT:
        kind, after, fix = _KEPT[act.what]
        awaited = children.awaited(state.rank, act)
        first = f" ({awaited[0]})" if awaited and len(kept) == 1 else ""
        found = _verdict(graph, kept, kind, f"{are} {act.words}{first}", after)
        fix = _TIMEOUT if awaited else fix
        return msgspec.structs.replace(found, fix=fix, details=(*awaited[len(first) > 0 :], *found.details))
    if act.what == "cuda" or (gpu.busy(card) and not state.rank.busy):
        text = f"{_verb(kept, 'waits', 'wait')} for the GPU{gpu.use(card)}"
        return _verdict(graph, kept, "gpu", text, "" if gpu.idle(card) else ": a kernel does not end")
    if (state.spins or state.rank.busy) and gpu.idle(card):
        text = (
            f"{_verb(kept, 'computes', 'compute')} on the CPU, or {_verb(kept, 'loops', 'loop')}, while the GPU is idle"
        )
        return _verdict(graph, kept, "loop", f"{text}{gpu.use(card)}")
    if state.spins or state.rank.busy:
        return _verdict(
            graph,
            kept,
            "loop",
            f"{_verb(kept, 'loops', 'loop')}, or {_verb(kept, 'computes', 'compute')} for very long,",
        )
    if act.what in MEETINGS:
        name = "init_process_group" if act.what == "join" else "new_group"
        return _verdict(graph, kept, "join", f"{are} still in {name}")
    return _verdict(graph, kept, "no progress", f"{have} made no progress for {time}")


def all_ranks(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict for a stall in which no rank is to blame."""
    alive = [each for each in graph.of(graph.states) if not each.gone]
    if not alive or graph.evidence.waited < graph.evidence.limit:
        return
    if any(slow(graph, each) or each.works or not each.stuck for each in alive):
        return
    if any(each.act.what == "debugger" for each in alive) or all(_unpaced(graph, each) for each in alive):
        return
    alike: dict[tuple[object, ...], list[RankState]] = {}
    for each in alive:
        if each.number not in graph.awaits and not each.unseen:
            alike.setdefault(_likeness(graph, each), []).append(each)
    if sum(map(len, alike.values())) == len(alive):
        yield from (data.verdict(graph, kept) or _kept(graph, kept) for kept in alike.values())
        return
    yield Verdict(
        kind="no progress",
        ranks=(),
        text=f"no progress for {words.duration(graph.evidence.waited)}, and the cause is unknown: "
        f"rank {alive[0].number} is {being(alive[0])}",
        place=alive[0].place,
        certain=False,
    )


def _unpaced(graph: WaitGraph, state: RankState) -> bool:
    """Return whether a rank waits for no other rank and never had a step time."""
    waits = state.number in graph.awaits or state.call is not None or state.act.what == "leaving"
    return not waits and state.rank.step < 0 and not overdue(graph, state)


def _verb(kept: Sequence[RankState], one: str, several: str) -> str:
    return one if len(kept) == 1 else several


def _verdict(graph: WaitGraph, kept: Sequence[RankState], kind: str, what: str, after: str = "") -> Verdict:
    ranks, place = tuple(each.number for each in kept), kept[0].place
    return Verdict(
        kind=kind,
        ranks=ranks,
        text=f"{words.who(ranks)} {what}{words.at(place)}{after}{graph.wait_for(ranks)}",
        details=(*_line(kept[0]), *(() if kind == "loop" else data.idle_gpu(kept[0]))),
        place=place,
        certain=False,
    )


def _line(state: RankState) -> tuple[str, ...]:
    place = state.place
    return (f"its line: {place.source}",) if place is not None and place.source else ()


def _late(graph: WaitGraph, kept: Sequence[RankState], waiting: Sequence[RankState]) -> Verdict:
    """Return a verdict about ranks that have not reached a common point."""
    state, ranks, others = kept[0], tuple(each.number for each in kept), [each.number for each in waiting]
    where = "init_process_group" if waiting[0].act.what == "join" else "new_group"
    ended = state.rank.ended
    doing = words.exit_text(ended) if ended is not None else described(state)
    if state.unseen:
        doing = state.rank.note or "it does not respond"
    return Verdict(
        kind="join",
        ranks=ranks,
        text=f"{words.who(ranks)} {_verb(kept, 'has', 'have')} not reached {where} ({doing}); "
        f"{words.others(others, graph.evidence, ranks)} {words.verb(others, 'waits', 'wait')} "
        f"for {words.verb(ranks, 'it', 'them')}{words.at(waiting[0].place)}",
        place=state.place,
        certain=ended is not None,
    )


def _never_came(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield verdicts for ranks about which nothing is known."""
    joining = [each for each in graph.of(graph.awaits) if each.act.what == "join" and each.call is None]
    missing = sorted(awaited_by(graph.awaits[each.number] for each in joining) - set(graph.states))
    if not missing:
        return
    here = [each.number for each in joining]
    yield Verdict(
        kind="join",
        ranks=tuple(missing),
        text=f"{words.who(missing)} of {graph.evidence.world_size} {words.verb(missing, 'has', 'have')} never joined: "
        f"{words.who(here)} {words.verb(here, 'waits', 'wait')} in {described(joining[0])}",
        place=joining[0].place,
    )
