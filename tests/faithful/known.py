"""Intended differences: each is documented, in docs/concepts/launch.md unless its reason says otherwise."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from tests.faithful.outcome import Difference


@dataclass(frozen=True)
class Known:
    kinds: tuple[str, ...]
    way: str  # patterns
    field: str
    lines: str  # a regular expression for each line that differs
    reason: str


SEE_THEMSELVES = ("main_facts", "symlink")
KNOWN = (
    Known(SEE_THEMSELVES, "*", "rank * stdout", "frozen objects .*", "the objects of torch's import are frozen"),
    Known(SEE_THEMSELVES, "warm", "rank * stdout", "stack .*", "warm: one more frame below the script"),
    Known(("import_hooks",), "*", "rank * stdout", r"\['Finder', .*'PathFinder'\]", "a finder of hidden modules"),
)


def reason(kind: str, way: str, difference: Difference) -> str | None:
    """Return why this difference is not a failure, or None."""
    fit = [one for one in KNOWN if kind in one.kinds and _fits(way, one.way) and _fits(difference.field, one.field)]
    reasons = {next((one.reason for one in fit if re.fullmatch(one.lines, line)), None) for line in difference.lines}
    return None if not reasons or None in reasons else "; ".join(sorted(map(str, reasons)))


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)
