"""Ranks that wait for each other: two groups in different order, messages without a counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.diagnose import words
from phalanx.diagnose.description import being, described
from phalanx.diagnose.evidence import CallEvidence
from phalanx.diagnose.rank_state import RankState, site
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph, awaited_by

_MESSAGES = ("send", "recv")
_ORDER = "the same order of the groups on all ranks"


def verdicts(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict for each cycle of ranks that wait for each other."""
    left = _entangled(graph)
    while left:
        circle = _circle(graph, left)
        yield _judge(graph, circle)
        left -= set(circle)
        left = {rank for rank in left if graph.awaits[rank].isdisjoint(circle)}
        left = _shrunk(graph, left)
    yield from _crossed(graph)
    yield from _unanswered(graph)


def _entangled(graph: WaitGraph) -> set[int]:
    return _shrunk(graph, set(graph.awaits))


def _shrunk(graph: WaitGraph, ranks: set[int]) -> set[int]:
    """Return the ranks that wait for one of these ranks and are awaited by one of them."""
    while True:
        missing = {graph.awaits[each] for each in ranks}  # most ranks wait for the same ones
        awaited = awaited_by(missing)
        within = {each for each in missing if not each.isdisjoint(ranks)}
        kept = {rank for rank in ranks if rank in awaited and graph.awaits[rank] in within}
        if kept == ranks:
            return kept
        ranks = kept


def _circle(graph: WaitGraph, ranks: set[int]) -> list[int]:
    way = [min(ranks)]
    while True:
        following = min(graph.awaits[way[-1]] & ranks)
        if following in way:
            return way[way.index(following) :]
        way.append(following)


def _judge(graph: WaitGraph, circle: list[int]) -> Verdict:
    states = [graph.states[rank] for rank in circle]
    messages = [(each, each.call) for each in states if each.call is not None and each.call.op in _MESSAGES]
    if len(circle) == 2 and len(messages) == 2:
        return _two(*messages[0], *messages[1])
    details = tuple(f"{words.who([each.number])}: {described(each)}" for each in states)
    chain = "; ".join(
        f"rank {each.number} is in {_in(each)}, which needs rank {circle[(index + 1) % len(circle)]}"
        for index, each in enumerate(states[:4])
    ) + (" ..." if len(states) > 4 else "")
    ranks = tuple(sorted(circle))
    if len(messages) == len(states):
        what, fix = "a circle of messages", "let one of them receive first, or use isend and irecv"
        return Verdict(kind="deadlock", ranks=ranks, text=f"{what}: {chain}", details=details, fix=fix,
                       place=states[0].place)  # fmt: skip
    if messages:
        state, call = messages[0]
        following = circle[(circle.index(state.number) + 1) % len(circle)]
        return _alone(graph, state, call, graph.states[following])
    groups = {each.call.group for each in states if each.call is not None}
    what = "deadlock between two groups" if len(groups) == 2 else "deadlock between groups"
    return Verdict(kind="deadlock", ranks=ranks, text=f"{what}: {chain}", details=details, place=states[0].place,
                   fix=_ORDER)  # fmt: skip


def _in(state: RankState) -> str:
    call = state.call
    if call is None or call.op in _MESSAGES:
        return described(state)
    group = next((each for each in state.rank.groups if each.name == call.group), None)
    name = (group.description or group.name) if group is not None else call.group
    return f"{words.numbered(call)} of group {name}{words.at(site(state, call))}"


def _two(one: RankState, mine: CallEvidence, other: RankState, theirs: CallEvidence) -> Verdict:
    """Return a verdict for two ranks that wait for each other in a send or receive."""
    ranks = tuple(sorted((one.number, other.number)))
    where = f"{described(one)}; {described(other)}"
    if mine.op == theirs.op:
        doing = "send to" if mine.op == "send" else "wait to receive from"
        return Verdict(
            kind="both send" if mine.op == "send" else "both receive",
            ranks=ranks,
            text=f"{words.who(ranks)} both {doing} each other: {where}",
            place=one.place,
            fix="let one of them receive first, or use isend and irecv"
            if mine.op == "send"
            else "let one of them send first",
        )
    return Verdict(
        kind="wrong tag",
        ranks=ranks,
        text=f"rank {one.number} and rank {other.number} use different tags for one message: {where}",
        place=one.place,
        details=(f"tag {mine.tag or 0} and tag {theirs.tag or 0}",),
        fix="the same tag for the send and its receive",
    )


def _alone(graph: WaitGraph, state: RankState, call: CallEvidence, peer: RankState) -> Verdict:
    """Return a verdict for a message whose other end does something else."""
    sends = call.op == "send"
    doing = words.exit_text(peer.rank.ended) if peer.rank.ended is not None else f"is {being(peer)}"
    to = "to" if sends else "from"
    tag = f" (tag {call.tag})" if call.tag else ""
    waiting = [rank for rank in graph.waiting_for([state.number]) if rank != peer.number]
    more = f"; {words.who(waiting)} {words.verb(waiting, 'waits', 'wait')} behind them" if waiting else ""
    return Verdict(
        kind="send without a receive" if sends else "receive without a send",
        ranks=tuple(sorted((state.number, peer.number))),
        text=f"rank {state.number} is in {call.op} {to} rank {peer.number}{tag}{words.at(site(state, call))}, "
        f"and rank {peer.number} {'does not receive it' if sends else 'does not send it'}: it {doing}{more}",
        place=site(state, call),
        fix=f"a {'recv' if sends else 'send'} on rank {peer.number} for it, before its next collective",
    )


def _unanswered(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict for each message to a rank that has ended or waits for other messages."""
    circling = _entangled(graph)
    for state in graph.of(set(graph.awaits) - circling):
        call = state.call
        if call is None or call.op not in _MESSAGES or call.peer is None:
            continue
        peer = graph.states.get(call.peer)
        if peer is not None and peer.number in graph.awaits[state.number] and peer.leaving:
            yield _alone(graph, state, call, peer)


def _crossed(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict for collectives of two groups in different order: with NCCL, each GPU runs another one."""
    orders: dict[tuple[tuple[str, int], tuple[str, int]], RankState] = {}
    for state in graph.states.values():
        if not state.stuck:
            continue
        queued = [call for call in state.rank.calls if not call.done and call.seq > 0]
        heads = list({call.group: call for call in reversed(queued)}.values())[::-1][:4]
        for first, second in _pairs(heads):
            key = ((first.group, first.seq), (second.group, second.seq))
            other = orders.get((key[1], key[0]))
            if other is not None and other.number != state.number:
                ranks = tuple(sorted((state.number, other.number)))
                yield Verdict(
                    kind="deadlock",
                    ranks=ranks,
                    text=f"deadlock between two groups: rank {other.number} queued {words.numbered(second)} of group "
                    f"{second.group} first, rank {state.number} {words.numbered(first)} of group {first.group}",
                    place=state.place,
                    fix=_ORDER,
                )
                return
            orders.setdefault(key, state)


def _pairs(calls: list[CallEvidence]) -> Iterator[tuple[CallEvidence, CallEvidence]]:
    for index, first in enumerate(calls):
        for second in calls[index + 1 :]:
            if first.group != second.group:
                yield first, second
