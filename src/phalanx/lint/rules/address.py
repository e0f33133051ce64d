"""The script sets address, port, rank or world size itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "fixed-address"
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def check(model: Model) -> Iterator[LintFinding]:
    """Yield a finding if the script sets the address of the rendezvous itself."""
    if not model.joins or model.reach.spawns:
        return  # a script that starts the ranks must set their address
    found = [*_set(model), *_given(model)]
    if not found:
        return
    node, what = found[0]
    names = ", ".join(dict.fromkeys(name for _, name in found))
    yield LintFinding(
        node.lineno,
        NAME,
        "warning",
        f"{names} {'stands' if len(found) == 1 else 'stand'} in the script: {_why(what)}",
        "leave it to the launcher, which sets them for each rank: init_process_group() with no address, rank or size",
        max(getattr(one, "end_lineno", 0) or 0 for one, _ in found[:1]),
    )


def _why(name: str) -> str:
    if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "rank", "world_size"):
        return "what the launcher says is lost, and ranks do not find each other"
    return "it works on one machine at most, and only once at a time"


def _set(model: Model) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for node in model.script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Subscript) or model.script.name(target.value) != "os.environ":
                continue
            key = target.slice
            if isinstance(key, ast.Constant) and key.value in _VARIABLES and _always(model, node):
                yield node, str(key.value)


def _given(model: Model) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for call in model.calls("init_process_group"):
        given = {word.arg: word.value for word in call.keywords}
        if not model.reach.everywhere(call):
            continue
        for name in ("rank", "world_size"):
            if isinstance(given.get(name), ast.Constant) and given[name].value not in (-1, None):  # type: ignore[attr-defined]
                yield call, name
        method = given.get("init_method")
        if isinstance(method, ast.Constant) and str(method.value).startswith("tcp://"):
            yield call, "init_method"


def _always(model: Model, node: ast.AST) -> bool:
    """Under no condition but that the script is run."""
    tests = [above.test for above in model.script.above(node) if isinstance(above, ast.If)]
    return all("__name__" in ast.unparse(test) for test in tests) and model.reach.everywhere(node)
