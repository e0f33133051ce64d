"""A tenth of the campaign, with the seed of the whole: `make fuzz` runs all of it."""

from __future__ import annotations

import pytest

from tests.fuzz import campaign
from tests.fuzz.targets import TARGETS

SEED, SHARE = 1, 0.1


@pytest.mark.parametrize("name", TARGETS)
def test_a_tenth_of_the_campaign(name: str) -> None:
    target = TARGETS[name]
    outcome = campaign.run(target, SEED, range(int(target.cases * SHARE)))
    assert not outcome.findings, "\n\n".join(map(str, outcome.findings))


def test_the_campaign_has_100_000_cases() -> None:
    assert sum(target.cases for target in TARGETS.values()) == 100_000


def test_a_case_that_fails_is_named() -> None:
    def check(chance, note) -> None:  # type: ignore[no-untyped-def]
        number = chance.randrange(10)
        note(number)
        assert number != 3

    from contextlib import nullcontext

    target = campaign.Target("example", 100, lambda: nullcontext(check))
    outcome = campaign.run(target, 7, range(100), most=1)
    (finding,) = outcome.findings
    assert "\n3\n" in str(finding)
    assert f"python -m tests.fuzz --target example --seed 7 --case {finding.number}" in str(finding)
    again = campaign.run(target, 7, [finding.number])
    assert len(again.findings) == 1
