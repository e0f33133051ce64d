"""A batch size that is multiplied by the world size although the data is sharded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "world-batch"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for batch sizes that are multiplied by the world size."""
    if not model.many:
        return
    if _scaled_rate(model):
        return
    for call in model.calls("DataLoader", "loader"):
        for word in call.keywords:
            if word.arg == "batch_size" and (text := _times_world(model, word.value, 3)):
                yield LintFinding(
                    word.value.lineno,
                    NAME,
                    "warning",
                    f"batch_size is that of one rank: `{text}` lets the batch of all grow with the square of the world "
                    "size, and the learning rate stays as it is",
                    "batch_size=N for N samples a rank, or N // world_size to keep the batch of all as it is",
                    call.end_lineno or 0,
                )


def _times_world(model: Model, value: ast.expr, depth: int) -> str:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and model.worlds.depends(value):
        return ast.unparse(value)
    if isinstance(value, ast.Name) and depth:
        for one in model.script.lookup(value):
            if one.kind == "value" and one.value is not None and (found := _times_world(model, one.value, depth - 1)):
                return found
    return ""


def _scaled_rate(model: Model) -> bool:
    """Return whether the learning rate or the loss depends on the world size."""
    for node in model.script.nodes:
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(ast.unparse(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AugAssign):
            pairs = [(ast.unparse(node.target), node.value)]
        elif isinstance(node, ast.keyword) and node.arg:
            pairs = [(node.arg, node.value)]
        for name, value in pairs:
            known = name.rpartition(".")[2].lower()
            if (known in ("lr", "learning_rate", "base_lr", "loss") or known.endswith("_lr")) and _by_world(
                model, value
            ):
                return True
    return False


def _by_world(model: Model, value: ast.expr) -> bool:
    return any(model.worlds.depends(node) for node in ast.walk(value) if isinstance(node, ast.expr))
