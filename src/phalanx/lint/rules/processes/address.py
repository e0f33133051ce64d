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
        f"{names} {'is' if len(found) == 1 else 'are'} fixed in the script: {_why(what)}",
        "leave it to the launcher, which sets them for each rank: init_process_group() with no address, rank or size",
        max(getattr(one, "end_lineno", 0) or 0 for one, _ in found[:1]),
    )


def _why(name: str) -> str:
    if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "rank", "world_size"):
        return "it overrides the value of the launcher, so the ranks cannot find each other"
    return "it works on one machine at most, and only once at a time"


def _set(model: Model) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for node, name, value in _written(model):
        if name in _VARIABLES and _fixed(model, value) and _always(model, node):
            yield node, str(name)


def _written(model: Model) -> Iterator[tuple[ast.stmt | ast.expr, object, ast.expr]]:
    """Yield where the environment is changed, the name of the variable, and its value."""
    name = model.script.name
    for node in model.script.nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Subscript) and name(target.value) == "os.environ":
                        yield node, getattr(target.slice, "value", None), value
            case ast.Call(func=func, args=[ast.Constant(value=key), value]) if name(func) == "os.putenv":
                yield node, key, value
            case ast.Call(func=func, args=args, keywords=words) if name(func) == "os.environ.update":
                for given in args:
                    if isinstance(given, ast.Dict):
                        for entry, value in zip(given.keys, given.values, strict=True):
                            yield node, getattr(entry, "value", None), value
                for word in words:
                    yield node, word.arg, word.value


def _fixed(model: Model, value: ast.expr) -> bool:
    """Return whether a value is constant in the script: a literal, `str(29500)`, or a name for one."""
    match value:
        case ast.Constant():
            return True
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            return _fixed(model, inner)
        case ast.Name():
            found = model.script.lookup(value)
            return bool(found) and all(one.kind == "value" and isinstance(one.value, ast.Constant) for one in found)
    return False


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
    """Return whether the node runs unconditionally when the script is run."""
    tests = [above.test for above in model.script.above(node) if isinstance(above, ast.If)]
    return all("__name__" in ast.unparse(test) for test in tests) and model.reach.everywhere(node)
