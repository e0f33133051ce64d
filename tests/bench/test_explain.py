"""`phalanx bench explain`: how it evaluates times."""

from __future__ import annotations

import pytest

from benchmarks.explain.benchmark import ProbeCost, cost, main, target
from phalanx.errors import OptionError


def test_a_cost_is_that_of_pairs() -> None:
    # The machine was slow in the second round, for both. That is not a difference between them.
    pairs = [(0.00101, 0.001), (0.0303, 0.03), (0.00101, 0.001)]
    found = cost(2, pairs, [(0.02, 0.01)] * 3, [0.002, 0.001, 0.009])
    assert found == ProbeCost(2, 1.0, 0.01, 0.0, 1.0, 0.0, 0.002)


@pytest.mark.parametrize(
    ("found", "met", "evidence"),
    [
        (ProbeCost(1, 1.0, 0.004, 0.001), True, "+0.40% ± 0.10%"),
        (ProbeCost(1, 1.0, 0.006, 0.001), False, "+0.60% ± 0.10%"),
        (ProbeCost(1, 1.0, 0.02, 0.01), False, "+2.00% ± 1.00%"),  # no matter how large the error is
        (ProbeCost(1, 1.0, 0.001, 0.06), None, "Too much noise to tell"),
        (ProbeCost(1, failure="exit code 1"), None, "exit code 1"),
    ],
)
def test_the_promise(found: ProbeCost, met: bool | None, evidence: str) -> None:
    judged = target(found)
    assert judged.met is met
    assert evidence in judged.evidence


def test_too_few_rounds() -> None:
    with pytest.raises(OptionError):
        main(["--rounds", "1"], {})
