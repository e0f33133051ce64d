"""A sampler without `set_epoch`: the same order in every epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "no-set-epoch"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for samplers without `set_epoch`."""
    if model.driven or any(isinstance(n, ast.Attribute) and n.attr == "set_epoch" for n in model.script.nodes):
        return
    if not any(isinstance(node, ast.For) and _epochs(node) for node in model.script.nodes):
        return
    for call in model.calls("DistributedSampler"):
        if _shuffles(call) and not _for_tests(model, call):
            name = _name(model, call)
            yield LintFinding(
                call.lineno,
                NAME,
                "warning",
                "without set_epoch this sampler draws the same order in every epoch",
                f"{name}.set_epoch(epoch) at the beginning of every epoch",
                call.end_lineno or 0,
            )


def _epochs(loop: ast.For) -> bool:
    return isinstance(loop.target, ast.Name) and "epoch" in (loop.target.id + ast.unparse(loop.iter)).lower()


def _shuffles(call: ast.Call) -> bool:
    given = {word.arg: word.value for word in call.keywords}
    value = given.get("shuffle", call.args[3] if len(call.args) > 3 else None)
    return value is None or (isinstance(value, ast.Constant) and bool(value.value))


def _for_tests(model: Model, call: ast.Call) -> bool:
    words = (_name(model, call) + " " + (ast.unparse(call.args[0]) if call.args else "")).lower()
    return any(word in words for word in ("val", "test", "eval", "dev"))


def _name(model: Model, call: ast.Call) -> str:
    for above in model.script.above(call):
        if isinstance(above, ast.Assign) and len(above.targets) == 1 and not isinstance(above.targets[0], ast.Tuple):
            name = ast.unparse(above.targets[0])
            return name if above.value is call else f"{name}.sampler"  # created in the call of a DataLoader
    return "sampler"
