"""A parsed script: syntax tree, parents, names and bindings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | Function | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While

_IGNORE = re.compile(r"#\s*phalanx:\s*ignore(?:\[([\w\s,-]*)\])?")


@dataclass(frozen=True)
class Binding:
    """How a name gets its value in a scope: `value`, or the part of it at an index."""

    kind: Literal["value", "loop", "parameter", "other"]
    value: ast.expr | None = None
    index: int | None = None
    line: int = 0


class Script:
    """A parsed script: `Script(text)`. Raises SyntaxError or ValueError."""

    def __init__(self, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's own escapes
            self.tree = ast.parse(text)
        self.text = text
        self.parents: dict[ast.AST, ast.AST] = {}
        for parent in ast.walk(self.tree):
            for child in ast.iter_child_nodes(parent):
                self.parents[child] = parent

    # -- around a node

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of a node, the innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the function or module that contains a node."""
        found = (above for above in self.above(node) if isinstance(above, Scope))
        return next(found, self.tree)

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose method contains a node."""
        return next((above for above in self.above(node) if isinstance(above, ast.ClassDef)), None)

    # -- names

    @cached_property
    def imports(self) -> dict[str, str]:
        """The full names of imported names: dist -> torch.distributed."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def modules(self) -> frozenset[str]:
        """All imported modules by their full names."""
        plain = {alias.name for node in self.nodes if isinstance(node, ast.Import) for alias in node.names}
        return frozenset(plain | set(self.imports.values()))

    def uses(self, *packages: str) -> bool:
        """Return whether the script imports one of these packages."""
        return any(name == package or name.startswith(f"{package}.") for name in self.modules for package in packages)

    def name(self, node: ast.AST | None) -> str:
        """Return the full dotted name: torch.distributed.all_reduce, self.model; empty for anything else."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self.name(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def last(self, node: ast.AST | None) -> str:
        """Return the last part of a name, even if the rest is unknown: `f().rank` -> rank."""
        return node.attr if isinstance(node, ast.Attribute) else self.name(node).rpartition(".")[2]

    # -- what is in it

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls in the order of the text."""
        found = [node for node in self.nodes if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions by name."""
        found: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return found

    def called(self, call: ast.Call) -> Function | None:
        """Return the function of this file that a call runs, if it is unambiguous."""
        if isinstance(call.func, ast.Name) and call.func.id not in self.imports:
            found = [f for f in self.functions.get(call.func.id, ()) if not isinstance(self.parents[f], ast.ClassDef)]
        elif isinstance(call.func, ast.Attribute) and self.name(call.func.value) == "self":
            here = self.owner(call)
            found = [f for f in self.functions.get(call.func.attr, ()) if self.parents[f] is here]
        else:
            return None
        return found[0] if len(found) == 1 else None

    def inside(self, *roots: ast.AST) -> Iterator[ast.AST]:
        """Yield everything that runs together with these nodes, without nested functions."""
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            yield node
            if not isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)) or node in roots:
                waiting += ast.iter_child_nodes(node)

    @cached_property
    def bindings(self) -> dict[ast.AST, dict[str, list[Binding]]]:
        """Bindings by scope and name. The scope of `self.x` is its class, that of `args.x` the module."""
        found: dict[ast.AST, dict[str, list[Binding]]] = {}
        scope: ast.AST
        for node in self.nodes:
            for target, binding in _bound(node):
                for name, one in _parts(target, binding):
                    scope = node if isinstance(node, Scope) else self.scope(node)
                    if "." in name:
                        scope = self._holder(name, node)
                    found.setdefault(scope, {}).setdefault(name, []).append(one)
        return found

    def lookup(self, node: ast.Name | ast.Attribute) -> list[Binding]:
        """Return the bindings of a name in the innermost scope that has any."""
        text = ast.unparse(node)
        if (around := self._loop_around(node)) is not None:
            return [around]
        scopes: list[ast.AST] = [self.scope(node), *self.above(self.scope(node))]
        for scope in scopes if isinstance(node, ast.Name) else [self._holder(text, node)]:
            if found := self.bindings.get(scope, {}).get(text):
                return found
        return []

    def _loop_around(self, node: ast.Name | ast.Attribute) -> Binding | None:
        """Return the loop whose variable a name is."""
        child: ast.AST = node
        for above in self.above(node):
            if isinstance(above, Scope):
                return None
            loops: Sequence[ast.For | ast.AsyncFor | ast.comprehension] = ()
            if isinstance(above, ast.For | ast.AsyncFor) and child is not above.iter:
                loops = [above]
            elif isinstance(above, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                loops = above.generators
            for loop in loops:
                if isinstance(node, ast.Name) and any(
                    name == node.id for name, _ in _parts(loop.target, Binding("loop"))
                ):
                    return Binding("loop", loop.iter)
            child = above
        return None

    def _holder(self, name: str, node: ast.AST) -> ast.AST:
        return (self.owner(node) if name.startswith("self.") else None) or self.tree

    # -- comments

    @cached_property
    def ignored(self) -> dict[int, frozenset[str]]:
        """Line -> rules that `# phalanx: ignore[rule, …]` silences. "*": all."""
        if "ignore" not in self.text:
            return {}
        found = {}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                rules = frozenset(rule.strip() for rule in (match[1] or "*").split(","))
                found[token.start[0]] = rules
        return found


def _bound(node: ast.AST) -> Iterator[tuple[ast.expr | str, Binding]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, Binding("value", node.value, line=node.lineno)
    elif (isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None) or isinstance(
        node, ast.AugAssign
    ):
        yield node.target, Binding("value", node.value, line=node.lineno)
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield node.target, Binding("loop", node.iter, line=node.lineno)
    elif isinstance(node, ast.comprehension):
        yield node.target, Binding("loop", node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, Binding("value", node.context_expr)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = node.args
        plain = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
        named = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        for place, (argument, default) in enumerate(named):
            yield argument.arg, Binding("parameter", default, place)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                yield rest.arg, Binding("other")


def _parts(target: ast.expr | str, binding: Binding) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, str):
        yield target, binding
    elif isinstance(target, ast.Name):
        yield target.id, binding
    elif isinstance(target, ast.Attribute):
        yield ast.unparse(target), binding
    elif isinstance(target, ast.Starred):
        yield from _parts(target.value, Binding("other"))
    elif isinstance(target, ast.Tuple | ast.List):
        value = binding.value
        for index, part in enumerate(target.elts):
            if (
                binding.kind == "value"
                and isinstance(value, ast.Tuple | ast.List)
                and len(value.elts) == len(target.elts)
            ):
                one = Binding(binding.kind, value.elts[index], line=binding.line)
            else:
                one = Binding(binding.kind, value, index, binding.line)
            yield from _parts(part, one)
