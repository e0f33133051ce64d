"""A collective that depends on a clock or a random number of each rank."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.operations import Kind
from phalanx.lint.rules.collectives.collective import divergent

NAME = "chance-collective"
_KINDS: tuple[Kind, ...] = ("collective", "group", "model")


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for collectives under a random condition."""
    reported: set[int] = set()  # conditions
    for kind in _KINDS:
        for one, divergence in divergent(model, kind, model.chance.depends):
            if one.quiet or divergence.line in reported:
                continue
            reported.add(divergence.line)
            yield LintFinding(
                one.node.lineno,
                NAME,
                "error",
                f"each rank decides for itself by `{divergence.test}` (line {divergence.line}), by its own clock or "
                f"its own random numbers, whether it comes to {one.what}",
                "let rank 0 decide and broadcast it, or decide by the step number",
                one.node.end_lineno or 0,
            )
