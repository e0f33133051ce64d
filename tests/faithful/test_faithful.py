"""The first kinds of `make faithful`, forked cold and from a warm fork server, each twice."""

from __future__ import annotations

import pytest

from tests.faithful.__main__ import Row, rows, text
from tests.faithful.kinds import KINDS, Kind
from tests.faithful.runs import LIMIT

FIRST = KINDS[:6]

pytestmark = [pytest.mark.xdist_group("faithful"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def compared() -> dict[str, Row]:
    """Run all of them, two at a time: most of a run is one process that imports."""
    return {row.kind.name: row for row in rows(FIRST, ("cold", "warm"), jobs=2, limit=LIMIT)}


@pytest.mark.parametrize("kind", FIRST, ids=lambda kind: kind.name)
def test_a_script_does_what_it_does_under_torchrun(kind: Kind, compared: dict[str, Row]) -> None:
    row = compared[kind.name]
    assert row.same, "\n".join(text(row, full=True))
    # A warm fork server imported torch without the values that these scripts set, so they are started cold.
    expected = {"", "was cold, not warm"} if kind.name.startswith("env_") else {""}
    assert {run.outcome.note for run in row.runs} <= expected
