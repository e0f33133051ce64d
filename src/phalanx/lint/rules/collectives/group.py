"""A group that only some ranks create."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.rules.collectives.collective import divergent

NAME = "rank-group"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for groups that only some ranks create."""
    for one, divergence in divergent(model, "group", model.ranks.depends):
        yield LintFinding(
            one.node.lineno,
            NAME,
            "error",
            f"{divergence.who}: every rank has to call {one.what}, in the same order, "
            "also for groups that it is not in",
            f"call {one.via + '()' if one.via else one.op} on every rank, and use the group under the condition",
            one.node.end_lineno or 0,
        )
