"""Conditions that are true on some ranks only, around a node or before it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.lint.operations import Operations
from phalanx.lint.script import Function, Loop, Script

_ENDS = ("sys.exit", "exit", "quit", "os._exit")
Divides = Callable[[ast.expr], bool]


@dataclass(frozen=True)
class BranchDivergence:
    """A condition that is true on some ranks only."""

    test: str  # source text
    line: int
    left: str = ""  # how the other ranks leave: return, break …; empty: the node is inside the condition

    @property
    def who(self) -> str:
        """A sentence about the ranks that reach the code."""
        if self.left:
            return f"where `{self.test}` (line {self.line}) a rank has left by `{self.left}`"
        return f"only ranks with `{self.test}` (line {self.line}) come to it"


class Divergences:
    """Finds conditions that differ between ranks."""

    def __init__(self, script: Script, operations: Operations) -> None:
        self.script = script
        self.operations = operations

    def find(self, node: ast.AST, divides: Divides, op: str = "") -> BranchDivergence | None:
        """Return the innermost condition. With `op`: unless its other branch performs the same operation."""
        child = node
        for parent in self.script.above(node):
            if found := self._under(parent, child, divides, op) or self._after(parent, child, divides, op):
                return found
            if isinstance(parent, Function):
                marks = [mark for mark in parent.decorator_list if divides(mark)]
                return BranchDivergence(f"@{ast.unparse(marks[0])}", marks[0].lineno) if marks else None
            if isinstance(parent, ast.Lambda | ast.ClassDef):
                return None
            child = parent
        return None

    # -- under a condition

    def _under(self, parent: ast.AST, child: ast.AST, divides: Divides, op: str) -> BranchDivergence | None:
        if isinstance(parent, ast.If | ast.While | ast.IfExp):
            if child is parent.test or not divides(parent.test):
                return None
            body, other = _list(parent.body), _list(parent.orelse)
            there = child in body
            others = [*(other if there else body), *self._before(parent, divides)]
            if isinstance(parent, ast.If) and self._way(parent.body if there else parent.orelse):
                others += self._later(parent)
            if op and (self._does(others, op) or self._paired(parent, divides, op)):
                return None
            text = ast.unparse(parent.test)
            return BranchDivergence(text if there else f"not ({text})", parent.lineno)
        if isinstance(parent, ast.BoolOp) and child in parent.values:
            for value in parent.values[: parent.values.index(child)]:
                if divides(value):
                    text = ast.unparse(value)
                    return BranchDivergence(text if isinstance(parent.op, ast.And) else f"not ({text})", value.lineno)
        return None

    def _before(self, node: ast.AST, divides: Divides) -> Iterator[ast.stmt]:
        """Yield the bodies of the previous `if` and `elif` branches."""
        above = self.script.parents[node]
        while isinstance(above, ast.If) and above.orelse == [node] and divides(above.test):
            yield from above.body
            node, above = above, self.script.parents[above]

    def _later(self, node: ast.AST) -> Iterator[ast.stmt]:
        """Yield the code of the ranks that do not leave."""
        for above in self.script.above(node):
            for block in _blocks(above):
                if node in block:
                    yield from block[block.index(node) + 1 :]
            if isinstance(above, Function):
                return
            node = above

    def _does(self, nodes: Sequence[ast.AST], op: str) -> bool:
        return any(one.op == op for one in self.operations.below(*nodes))

    def _paired(self, node: ast.AST, divides: Divides, op: str) -> bool:
        """Return whether another condition complements it: `if rank != 0: barrier()` … `if rank == 0: barrier()`."""
        scope = self.script.scope(node)
        if not isinstance(node, ast.If) or isinstance(scope, ast.Lambda):
            return False
        text, around = ast.unparse(node.test), set(self.script.above(node))
        return any(
            divides(other.test) and ast.unparse(other.test) != text and self._does([*other.body, *other.orelse], op)
            for other in self.script.inside(*scope.body)
            if isinstance(other, ast.If)
            and other is not node
            and other not in around
            and node not in self.script.above(other)
        )

    # -- after some have left

    def _after(self, parent: ast.AST, child: ast.AST, divides: Divides, op: str) -> BranchDivergence | None:
        for block in _blocks(parent):
            if child in block:
                before = block[: block.index(child)]
                near = isinstance(parent, Loop) or (not isinstance(parent, Function) and self._loop(parent) is not None)
                ways = ("return", "exit", "continue", "break") if near else ("return", "exit")
                if found := self._leaving(before, divides, op, ways):
                    return found
        if isinstance(parent, Loop) and child in parent.body:
            # A rank that has left the loop does not return here.
            return self._leaving(parent.body, divides, op, ("return", "exit", "break"))
        return None

    def _loop(self, node: ast.AST) -> ast.AST | None:
        for above in self.script.above(node):
            if isinstance(above, Loop):
                return above
            if isinstance(above, Function):
                return None
        return None

    def _leaving(
        self, nodes: Sequence[ast.AST], divides: Divides, op: str, ways: Sequence[str]
    ) -> BranchDivergence | None:
        for node, depth in _with_depth(nodes):
            if not isinstance(node, ast.If) or not divides(node.test):
                continue
            here = self._way(node.body), self._way(node.orelse)
            if bool(here[0]) == bool(here[1]):
                continue
            left, branch = (here[0], node.body) if here[0] else (here[1], node.orelse)
            if left not in ways or (depth and left in ("continue", "break")) or (op and self._does(branch, op)):
                continue
            text = ast.unparse(node.test)
            return BranchDivergence(text if here[0] else f"not ({text})", node.lineno, left)
        return None

    def _way(self, branch: Sequence[ast.stmt]) -> str:
        """Return how a rank leaves: return, break …"""
        for node, depth in _with_depth(branch):
            if isinstance(node, ast.Return) or (isinstance(node, ast.Continue | ast.Break) and not depth):
                return type(node).__name__.lower()
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Call) and self.script.name(value.func) in _ENDS:
                return "exit"
        return ""


def _list(branch: object) -> list[ast.AST]:
    return branch if isinstance(branch, list) else [branch] if isinstance(branch, ast.AST) else []


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield block


def _with_depth(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, int]]:
    """Yield the statements below with the number of loops around each."""
    waiting = [(node, 0) for node in reversed(nodes)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        if isinstance(node, ast.stmt) and not isinstance(node, (*Function.__args__, ast.ClassDef)):
            deeper = depth + isinstance(node, Loop)
            below = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
            waiting += [(child, deeper) for child in reversed(below)]
