"""`input()` on ranks, which have no terminal."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "input"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for `input()` on every rank."""
    if not model.many:
        return
    for call in model.script.calls:
        asks = isinstance(call.func, ast.Name) and call.func.id == "input" and not model.script.lookup(call.func)
        if (asks and "input" not in model.script.functions) and model.reach.everywhere(call):
            yield LintFinding(
                call.lineno,
                NAME,
                "error",
                "every rank asks, and none has a terminal: input() fails, or waits forever",
                "an option of the command line; or ask on rank 0 alone, before the others wait for it",
                call.end_lineno or 0,
            )
