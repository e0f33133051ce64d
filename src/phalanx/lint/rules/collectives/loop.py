"""A collective in a loop that some ranks run more often than others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "uneven-loop"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for collectives in loops whose length may differ between ranks."""
    for loop in model.script.nodes:
        if not isinstance(loop, ast.For) or not _uneven(model, loop.iter):
            continue
        if any(_joined(model, above) for above in model.script.above(loop)):
            continue
        for one in model.operations.below(*loop.body):
            if not one.part and not one.quiet:
                yield LintFinding(
                    loop.lineno,
                    NAME,
                    "warning",
                    f"ranks go around `for … in {ast.unparse(loop.iter)}` a different number of times where the data "
                    f"do not divide evenly: {one.what} (line {one.node.lineno}) waits for ranks that are done",
                    "give every rank the same number: DistributedSampler(drop_last=True), or cut the data to a "
                    "multiple of the world size; or use torch.distributed.algorithms.join.Join",
                    loop.lineno,
                )
                break


def _uneven(model: Model, data: ast.expr) -> bool:
    """Return whether the length depends on the rank: `data[rank::world]`, `range(rank, n, world)`, `range(rank)`."""
    if isinstance(data, ast.Call):
        last = model.script.last(data.func)
        if last == "range" and len(data.args) == 1:
            return model.ranks.depends(data.args[0])
        if last == "range" and len(data.args) == 3:
            start, stop, step = data.args
            return model.ranks.depends(start) and model.worlds.depends(step) and not model.worlds.mentions(stop)
        if last in ("enumerate", "tqdm", "list", "sorted", "zip", "DataLoader") and data.args:
            return _uneven(model, data.args[0])
        return False
    if isinstance(data, ast.Subscript) and isinstance(data.slice, ast.Slice):
        cut = data.slice
        return (
            cut.lower is not None
            and cut.step is not None
            and cut.upper is None
            and model.ranks.depends(cut.lower)
            and model.worlds.depends(cut.step)
            and not model.worlds.mentions(data.value)
        )
    if isinstance(data, ast.Name):
        found = model.script.lookup(data)
        return (
            len(found) == 1
            and found[0].value is not None
            and found[0].kind == "value"
            and _uneven(model, found[0].value)
        )
    return False


def _joined(model: Model, node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        model.script.last(item.context_expr.func) in ("Join", "join")
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
    )
