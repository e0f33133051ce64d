"""A collective that only some ranks call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.divergence import BranchDivergence, Divides
from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.operations import Kind, RankOperation

NAME = "rank-collective"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for collectives that only some ranks call."""
    for one, divergence in divergent(model, "collective", model.ranks.depends):
        yield LintFinding(
            one.node.lineno,
            NAME,
            "error",
            f"{divergence.who}: {one.what} waits forever for the others",
            f"call {one.via + '()' if one.via else one.op} on every rank, outside the condition"
            + (" and before any rank leaves" if divergence.left else ""),
            one.node.end_lineno or 0,
        )


def divergent(model: Model, kind: Kind, divides: Divides) -> Iterator[tuple[RankOperation, BranchDivergence]]:
    """Yield collective operations that ranks reach on different paths."""
    if _smaller(model):
        return
    seen: set[ast.Call] = set()
    left: set[int] = set()  # places where ranks leave early: report each cause once
    for one in model.operations.all():
        if one.kind != kind or one.part or one.node in seen or _expected(model, one.node):
            continue
        divergence = model.divergences.find(one.node, divides, one.op)
        if divergence is not None and not (divergence.left and divergence.line in left):
            seen.add(one.node)
            left |= {divergence.line} if divergence.left else set()
            yield one, divergence


def _smaller(model: Model) -> bool:
    """Return whether the world contains only some of the ranks: then nothing is known."""
    return any(
        one.op == "init_process_group" and one.part and model.divergences.find(one.node, model.ranks.depends)
        for one in model.operations.all()
    )


def _expected(model: Model, node: ast.AST) -> bool:
    """Return whether a test expects the failure."""
    return any(
        "raises" in ast.unparse(item.context_expr).lower()
        for above in model.script.above(node)
        if isinstance(above, ast.With)
        for item in above.items
    )
