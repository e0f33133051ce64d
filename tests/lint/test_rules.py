"""Each rule finds its fault, on the right line, and nothing in the correct version of the script."""

from __future__ import annotations

import pytest

from phalanx.lint.inspection import RULES, inspect
from tests.lint.snippets.scripts import BAD, GOOD, script, whole
from tests.lint.snippets.whole import BAD_WHOLE, GOOD_WHOLE

WRONG = [
    *(pytest.param(r, script(s), id=f"{r}: {t}") for r, cases in BAD.items() for t, s in cases.items()),
    *(pytest.param(r, whole(s), id=f"{r}: {t}") for r, cases in BAD_WHOLE.items() for t, s in cases.items()),
]
RIGHT = [
    *(pytest.param(script(s), id=f"{r}: {t}") for r, cases in GOOD.items() for t, s in cases.items()),
    *(pytest.param(whole(s), id=title) for title, s in GOOD_WHOLE.items()),
]


@pytest.mark.parametrize(("rule", "text"), WRONG)
def test_wrong_code_is_found_on_its_line(rule: str, text: str) -> None:
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# !")]
    found = inspect(text)
    assert [(one.rule, one.line) for one in found] == [(rule, line) for line in marked], found
    assert all(one.reason and one.fix for one in found)


@pytest.mark.parametrize("text", RIGHT)
def test_correct_code_has_no_findings(text: str) -> None:
    assert inspect(text) == []


def test_every_rule_has_both() -> None:
    assert set(BAD) | set(BAD_WHOLE) == set(RULES)
    assert set(RULES) - set(GOOD) == {"no-destroy"}  # every other script here destroys its group
