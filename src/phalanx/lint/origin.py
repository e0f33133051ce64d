"""Traces the source of a value: the rank, the world size, a clock or a random number."""

from __future__ import annotations

import ast
from collections.abc import Callable

from phalanx.lint.script import Binding, Function, Script

_THROUGH = {"int", "float", "bool", "str", "abs", "min", "max", "round", "divmod"}


class Origin:
    """Traces values to a source. `depends(expression)`: the value is computed from the source. `mentions`: a part of it
    is.

    Values are followed through names, arithmetic, comparisons, and results of functions of this file. They are not
    followed through other calls: the result of `model(x.to(rank))` does not depend on the rank in this sense.
    """

    def __init__(
        self,
        script: Script,
        source: Callable[[ast.expr], bool],
        names: frozenset[str] = frozenset(),
        settled: Callable[[ast.Compare], bool] = lambda _: False,
        *,
        always: bool = False,
    ) -> None:
        self.script = script
        self._source = source
        self._names = names  # names that denote such a value where nothing else is known
        self._settled = settled  # comparisons that give the same result on all ranks
        self._always = always  # a name is such a value only if nothing else is ever bound to it
        self._known: dict[ast.AST, bool] = {}
        self._deep: dict[ast.AST, bool] = {}

    def depends(self, node: ast.expr) -> bool:
        """Return whether the value of an expression depends on the source."""
        if node not in self._known:
            self._known[node] = False  # ends recursion in cycles
            self._known[node] = self._source(node) or self._computed(node)
        return self._known[node]

    def mentions(self, node: ast.AST) -> bool:
        """Return whether any expression inside `node` depends on the source."""
        if node not in self._deep:
            self._deep[node] = False
            self._deep[node] = any(
                self.depends(part) or self._assigned_from_source(part)
                for part in ast.walk(node)
                if isinstance(part, ast.expr)
            )
        return self._deep[node]

    def _assigned_from_source(self, part: ast.expr) -> bool:
        if not isinstance(part, ast.Name | ast.Attribute):
            return False
        return any(one.value is not None and self.mentions(one.value) for one in self.script.lookup(part))

    def _computed(self, node: ast.expr) -> bool:
        match node:
            case ast.Name() | ast.Attribute():
                return self._bound(node)
            case ast.BinOp(left=left, right=right):
                return self.depends(left) or self.depends(right)
            case ast.BoolOp(values=values):
                return any(map(self.depends, values))
            case ast.UnaryOp(operand=value) | ast.NamedExpr(value=value):
                return self.depends(value)
            case ast.Compare(left=left, comparators=others):
                return not self._settled(node) and any(map(self.depends, (left, *others)))
            case ast.IfExp(test=test, body=body, orelse=other):
                if any(isinstance(arm, ast.Constant) and isinstance(arm.value, str) for arm in (body, other)):
                    return self.depends(test)  # `rank if there is a GPU else "cpu"` is a device
                return any(map(self.depends, (test, body, other)))
            case ast.Call():
                return self._returned(node)
        return False

    def _bound(self, node: ast.Name | ast.Attribute) -> bool:
        found = self.script.lookup(node)
        values = [(one.value, one.index) for one in found if one.kind == "value" and one.value is not None]
        if self._always:
            values = [value for value in values if not isinstance(value[0], ast.Constant)]
            return bool(values) and all(self._value(*value) for value in values)
        if any(self._value(*value) for value in values):
            return True
        if self.script.last(node) not in self._names:
            return False
        return not found or any(map(_unknown, found))

    def _value(self, value: ast.expr, index: int | None) -> bool:
        if index is None:
            return self.depends(value)
        function = self.script.called(value) if isinstance(value, ast.Call) else None
        parts = [r.elts for r in _returns(self.script, function) if isinstance(r, ast.Tuple)] if function else []
        return any(self.depends(part[index]) for part in parts if index < len(part))

    def _returned(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Name) and call.func.id in _THROUGH:
            return any(map(self.depends, call.args))
        if isinstance(call.func, ast.Attribute) and call.func.attr == "item":
            return self.depends(call.func.value)
        function = self.script.called(call)
        return function is not None and any(map(self.depends, _returns(self.script, function)))


def _unknown(one: Binding) -> bool:
    """Return whether a value may be what its name suggests: no constant (`rank=8` of a matrix), no loop variable."""
    if one.kind in ("loop", "other"):
        return False
    if isinstance(one.value, ast.Constant):
        return one.kind == "parameter" and one.value.value in (0, -1, None)
    return True


def _returns(script: Script, function: Function) -> list[ast.expr]:
    return [n.value for n in script.inside(*function.body) if isinstance(n, ast.Return) and n.value is not None]
