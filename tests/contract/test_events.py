"""Events: what a line of them contains."""

from __future__ import annotations

from phalanx.contract import events
from phalanx.watch.model import simulation


def test_the_places_of_many_ranks_fit_into_one_mebibyte() -> None:
    """The name of a host is written once per node: every loss of a node writes this event."""
    (event,) = (one for one in simulation.begin(32_768, now=1.7e9) if isinstance(one, events.RankInfos))
    line = events.encode(event)
    assert len(line) < 1 << 20
    assert events.decode(line) == event
    assert [(info.rank, node.node) for node, info in event.each()] == [(rank, rank // 8) for rank in range(32_768)]
