"""The readiness of all nodes, from that of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.launcher.workers.regroup.readiness import Readiness, ReadinessTable

READINESS = st.builds(Readiness, st.booleans(), st.booleans(), st.booleans())


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | READINESS), max_size=30))
def test_the_counts_agree_with_a_look_at_all_nodes(changes: list[tuple[int, Readiness | None]]) -> None:
    table, known = ReadinessTable(), dict[int, Readiness]()
    for node, readiness in changes:
        if readiness is None:
            table.remove(node)
            known.pop(node, None)
        else:
            table[node] = known[node] = readiness
        assert set(table) == set(known)
        assert table[node] == known.get(node, Readiness())
        assert table.overall == Readiness(
            any(each.connected for each in known.values()),
            any(each.finished for each in known.values()),
            all(each.all_connected for each in known.values()),
        )
