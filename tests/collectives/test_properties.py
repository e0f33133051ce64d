"""Random plans of calls, on a phalanx group and on gloo: the same results, whatever the calls and their order."""

from __future__ import annotations

import pytest

from tests.collectives.ranks import program


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_plans_go_as_on_gloo(engine: str) -> None:
    batches = "16" if engine == "shm" else "6"
    output = program("plans", "--engines", engine, "--batches", batches, "--ranks", "2", "3", "4")
    assert [line.split(":")[0] for line in output.splitlines()] == [f"{engine}, {ranks} ranks" for ranks in (2, 3, 4)]
