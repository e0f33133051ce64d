"""A wrapped model that only some ranks call."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.rules.collectives.collective import divergent

NAME = "rank-forward"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for forward passes of a wrapped model on some ranks only."""
    for one, divergence in divergent(model, "model", model.ranks.depends):
        if one.quiet:
            yield LintFinding(
                one.node.lineno,
                NAME,
                "warning",
                f"{divergence.who}: {one.what} of a wrapped model waits for the others if it has buffers (batch norm)",
                "call model.module there, which is the model itself",
                one.node.end_lineno or 0,
            )
        else:
            yield LintFinding(
                one.node.lineno,
                NAME,
                "error",
                f"{divergence.who}: {one.what} of a wrapped model waits forever for the others",
                "do it on every rank; to look at the model on one, call model.module under torch.no_grad()"
                if one.op == "forward"
                else "do it on every rank, outside the condition",
                one.node.end_lineno or 0,
            )
