"""A script that starts its own ranks: under a launcher, every rank would start them again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.ranks import SPAWNS

NAME = "nested-spawn"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield a finding for mp.spawn in a script of ranks, if no condition keeps it from running under a launcher."""
    if not model.joins:
        return
    for call in model.reach.spawns:
        name = model.script.name(call.func)
        if name in SPAWNS and not _conditional(model, call):
            yield LintFinding(
                call.lineno,
                NAME,
                "warning",
                f"mp.{name.rpartition('.')[2]} starts the ranks: under phalanx run or torchrun, which start ranks "
                "themselves, every rank starts all of them again, and they meet at one port",
                "call the function once, with int(os.environ['RANK']), and start it with phalanx run -g N; "
                "or start this script with plain python, or use phalanx.spawn",
                call.end_lineno or 0,
            )
            return


def _conditional(model: Model, call: ast.Call) -> bool:
    """Return whether the call depends on a condition, such as an option or RANK being set by a launcher."""
    above = list(model.script.above(call))
    if any(isinstance(one, ast.IfExp | ast.Match | ast.Try) for one in above):
        return True
    tests = [one.test for one in above if isinstance(one, ast.If)]
    if any("__name__" not in ast.unparse(test) for test in tests):
        return True
    scope = model.script.scope(call)
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return any(isinstance(one, ast.Return) and one.lineno < call.lineno for one in model.script.inside(*scope.body))
