"""A tenth of `make faithful`: the first kinds, forked cold and warm, each twice; one as new interpreters, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faithful.__main__ import compare, text
from tests.faithful.kinds import KINDS, Kind
from tests.faithful.runs import Lane

TENTH = KINDS[:6]
ALSO_FRESH = "main_facts"

pytestmark = pytest.mark.xdist_group("faithful")


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with Lane() as lane:
        lane.warm_up()
        yield lane


@pytest.mark.parametrize("kind", TENTH, ids=lambda kind: kind.name)
def test_a_script_does_what_it_does_under_torchrun(kind: Kind, lane: Lane) -> None:
    ways = ("cold", "warm", *(("fresh",) if kind.name == ALSO_FRESH else ()))
    row = compare(kind, lane, ways)
    assert row.same, "\n".join(text(row, full=True))
    assert [run.outcome.note for run in row.runs] == [""] * len(row.runs)
