"""A collective that only some ranks call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.operations import Kind, RankOperation
from phalanx.lint.parting import Divides, Parting

NAME = "rank-collective"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for collectives that only some ranks call."""
    for one, parting in lone(model, "collective", model.ranks.depends):
        yield LintFinding(
            one.node.lineno,
            NAME,
            "error",
            f"{parting.who}: {one.what} waits for the others for ever",
            f"call {one.via + '()' if one.via else one.op} on every rank, outside the condition"
            + (" and before any rank leaves" if parting.left else ""),
            one.node.end_lineno or 0,
        )


def lone(model: Model, kind: Kind, divides: Divides) -> Iterator[tuple[RankOperation, Parting]]:
    """Yield operations of all ranks that ranks reach on different paths."""
    if _smaller(model):
        return
    seen: set[ast.Call] = set()
    left: set[int] = set()  # where ranks leave early: report one cause once
    for one in model.operations.all():
        if one.kind != kind or one.part or one.node in seen or _expected(model, one.node):
            continue
        parting = model.partings.find(one.node, divides, one.op)
        if parting is not None and not (parting.left and parting.line in left):
            seen.add(one.node)
            left |= {parting.line} if parting.left else set()
            yield one, parting


def _smaller(model: Model) -> bool:
    """Return whether the world is only some of the ranks: nothing is known then."""
    return any(
        one.op == "init_process_group" and one.part and model.partings.find(one.node, model.ranks.depends)
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
