"""Ranks that connect to a store at an address that the script has set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.diagnose import words
from phalanx.diagnose.description import described
from phalanx.diagnose.rank_state import RankState
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph


def verdicts(graph: WaitGraph) -> Iterator[Verdict]:
    """Yield verdicts about ranks that cannot join the group."""
    joining = [
        each
        for each in graph.of(graph.states)
        if each.act.what == "join" and each.call is None and each.stuck and not (each.gone or each.stopped)
    ]
    elsewhere = [each for each in joining if each.rank.store and _unserved(each, joining)]
    if elsewhere:
        yield _verdict(graph, elsewhere)


def _unserved(state: RankState, joining: Sequence[RankState]) -> bool:
    """Return whether nothing listens at the address that the rank uses."""
    if not state.rank.hosts:
        return True
    host = next((each for each in joining if each.number == 0), None)
    return host is not None and host.rank.store != state.rank.store


def _verdict(graph: WaitGraph, elsewhere: Sequence[RankState]) -> Verdict:
    by_address: dict[str, list[int]] = {}
    for each in elsewhere:
        by_address.setdefault(each.rank.store, []).append(each.number)
    first, ranks = elsewhere[0], tuple(each.number for each in elsewhere)
    waits = "; ".join(
        f"{words.who(numbers)} {words.verb(numbers, 'waits', 'wait')} for a store at {address}"
        for address, numbers in list(by_address.items())[:4]
    )
    listens = (
        "rank 0 should host the store, at an address that all ranks agree on"
        if first.rank.hosts
        else f"no rank listens there, the launcher's store is at {first.rank.given}"
    )
    names = _names(first)
    single = len(graph.evidence.nodes) <= 1 and len(by_address) == 1 and first.rank.given
    same_host = single and first.rank.store.rpartition(":")[0] == first.rank.given.rpartition(":")[0]
    port = first.rank.store.rpartition(":")[2]
    instead = f", or type: phalanx run --master-port {port} …" if same_host and not first.rank.hosts else ""
    return Verdict(
        kind="address",
        ranks=ranks,
        text=f"{waits} in {described(first)}: the script has set {names} ({listens})",
        place=first.place,
        fix=f"do not set {names} in the script: the launcher has set the same for all ranks{instead}",
    )


def _names(state: RankState) -> str:
    """Return the variables that differ from those of the launcher."""
    own, given = (address.rpartition(":") for address in (state.rank.store, state.rank.given))
    pairs = (("MASTER_ADDR", own[0], given[0]), ("MASTER_PORT", own[2], given[2]))
    return " and ".join(name for name, mine, theirs in pairs if mine != theirs) or "MASTER_PORT"
