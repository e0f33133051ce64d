"""The network between ranks: all ranks take part in a collective, and there is no progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

from phalanx.diagnose import words
from phalanx.diagnose.description import described
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rank_state import RankState, backend
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph, members_of, newest

_UNTIMED = (
    "or a kernel queued before it does not end on one GPU: with TORCH_NCCL_ENABLE_TIMING=1 torch records which GPUs "
    "have started it"
)
_DOCTOR = "phalanx doctor checks the network between them"


def verdicts(graph: WaitGraph, diverged: Container[str]) -> Iterator[Verdict]:
    """Yield verdicts. `diverged`: groups whose ranks did not call the same collective."""
    yield from _collectives(graph, diverged)
    yield from _messages(graph)
    yield from _joining(graph)


def partition(evidence: Evidence) -> Verdict | None:
    """Return a verdict about nodes that cannot reach each other although node 0 reaches them.

    It blames the node in most of these pairs; of several such nodes, the one with the highest number.
    """
    nodes = {rank.rank: rank.node for rank in evidence.ranks}
    pairs = {
        (min(facts.node, other), max(facts.node, other))
        for facts in evidence.nodes
        for other in (nodes.get(rank) for rank in facts.unreached)
        if other is not None and other != facts.node
    }
    if not pairs:
        return None
    cut = Counter(node for pair in pairs for node in pair)
    worst = max(cut, key=lambda node: (cut[node], node))
    hosts = {facts.node: facts.host for facts in evidence.nodes}
    names = {node: f"node {node} ({hosts[node]})" if hosts.get(node) else f"node {node}" for node in cut}
    text = "; ".join(f"{names[a]} and {names[b]} do not reach each other" for a, b in sorted(pairs)[:4])
    return Verdict(
        kind="partition",
        ranks=tuple(sorted(rank for rank, node in nodes.items() if node == worst)),
        text=f"{text}, though node 0 reaches both" if len(pairs) == 1 else f"{text}, though node 0 reaches them",
        fix=_DOCTOR,
        certain=True,
    )


def _collectives(graph: WaitGraph, diverged: Container[str]) -> Iterator[Verdict]:
    together: dict[tuple[str, int, str], list[RankState]] = {}
    for state in graph.of(graph.awaits):
        call = state.call
        if call is not None and call.op not in ("send", "recv") and call.group not in diverged:
            together.setdefault((call.group, call.seq, call.op if call.seq <= 0 else ""), []).append(state)
    for (group, seq, _), waiting in together.items():
        members = members_of(waiting[0], graph.states)
        if len(members) < 2 or any(graph.awaits[each.number] for each in waiting):
            continue
        if any(each.leaving or each.stopped or each.gone for each in graph.of(members)):
            continue
        here = {each.number for each in waiting}
        first = waiting[0]
        if here == members:
            yield _same(graph, waiting)
        elif seq > 0 and all((newest(graph.states[rank].rank, group) or 0) >= seq for rank in members - here):
            ranks = tuple(sorted(here))
            yield Verdict(
                kind="network",
                ranks=ranks,
                text=f"{words.who(ranks)} {words.verb(ranks, 'is', 'are')} still in {described(first)}, which "
                f"{words.who(members - here)} {words.verb(members - here, 'has', 'have')} left behind: "
                f"{_cause(graph, 'what they sent has not arrived')}",
                place=first.place,
                fix=_DOCTOR,
                certain=False,
            )


def _same(graph: WaitGraph, waiting: list[RankState]) -> Verdict:
    first = waiting[0]
    all_waiting = len(waiting) == len(graph.states)
    who = f"all {len(waiting)} ranks" if all_waiting else words.who(each.number for each in waiting)
    unsent = [each for each in waiting if each.rank.process is not None and each.rank.process.unsent > 0]
    details = [
        f"rank {each.number}: {words.quantity(each.rank.process.unsent)} sent but not received"
        for each in unsent[:8]
        if each.rank.process is not None
    ]
    call = first.call
    if call is not None and "nccl" in backend(first.rank, call.group) and call.started is None:
        details.append(_UNTIMED)
    return Verdict(
        kind="network",
        ranks=(),
        text=f"{who} wait in the same collective, {described(first)}: {_between(graph)}",
        details=tuple(details),
        place=first.place,
        fix=_DOCTOR,
        certain=False,
    )


def _between(graph: WaitGraph) -> str:
    alone = len(graph.evidence.nodes) == 1 and not _finding(graph)
    return "the way between them on this node" if alone else f"the network{_finding(graph)}"


def _finding(graph: WaitGraph) -> str:
    found = graph.evidence.finding or next((node.finding for node in graph.evidence.nodes if node.finding), "")
    return f" ({found})" if found else ""


def _cause(graph: WaitGraph, otherwise: str) -> str:
    return f"the network{_finding(graph)}" if _finding(graph) else otherwise


def _messages(graph: WaitGraph) -> Iterator[Verdict]:
    for state in graph.of(graph.awaits):
        call = state.call
        if call is None or call.op != "send" or graph.awaits[state.number]:
            continue
        peer = graph.states.get(call.peer) if call.peer is not None else None
        if peer is not None and peer.stuck and peer.call is not None and peer.call.op == "recv":
            yield Verdict(
                kind="network",
                ranks=tuple(sorted((state.number, peer.number))),
                text=f"rank {state.number} sends, rank {peer.number} receives, and it does not progress "
                f"({described(state)}; {described(peer)}): {_between(graph)}",
                place=state.place,
                fix=_DOCTOR,
                certain=False,
            )


def _joining(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield a verdict if all ranks try to form the group, without success."""
    waiting = [each for each in graph.of(graph.awaits) if each.call is None and not graph.awaits[each.number]]
    if len(waiting) < 2 or len(waiting) != len(graph.states):
        return
    yield Verdict(
        kind="join",
        ranks=(),
        text=f"all {len(waiting)} ranks are in {described(waiting[0])} and do not meet: "
        f"they do not reach each other{_finding(graph)}",
        place=waiting[0].place,
        fix=_DOCTOR,
        certain=False,
    )
