"""Which code every rank reaches, as far as this file shows."""

from __future__ import annotations

import ast
from functools import cached_property

from phalanx.lint.divergence import Divergences
from phalanx.lint.origin import Origin
from phalanx.lint.ranks import SPAWNS
from phalanx.lint.script import Function, Script

_PROCESSES = ("Process", "start_processes", "spawn", "notebook_launcher", "elastic_launch", "fork")


class CodeReach:
    """Which code every rank reaches."""

    def __init__(self, script: Script, ranks: Origin, divergences: Divergences) -> None:
        self.script = script
        self.ranks = ranks
        self.divergences = divergences
        self._known: dict[ast.AST, bool] = {}

    def everywhere(self, node: ast.AST) -> bool:
        """Return whether every rank reaches a node. Functions without callers in this file are not reached."""
        if node not in self._known:
            self._known[node] = False
            self._known[node] = self.divergences.find(node, self.ranks.depends) is None and self._entered(node)
        return self._known[node]

    def _entered(self, node: ast.AST) -> bool:
        scope = self.script.scope(node)
        if isinstance(scope, ast.Module):
            # The first process, which starts the ranks, is not a rank.
            return not self.spawns
        if isinstance(scope, ast.Lambda):
            return self.everywhere(scope)
        if scope in self.spawned:
            return True
        return any(self.everywhere(place) for place in self._uses(scope))

    def _uses(self, function: Function) -> list[ast.AST]:
        """Return the uses of a function: a method after a dot, its class for `__init__`."""
        owner = self.script.parents[function]
        if not isinstance(owner, ast.ClassDef):
            return self._names.get(function.name, [])
        if function.name in ("__init__", "__post_init__"):
            parents = self.script.parents
            return [n for n in self._names.get(owner.name, []) if getattr(parents[n], "func", None) is n]
        return self._names.get(f".{function.name}", [])

    @cached_property
    def spawns(self) -> list[ast.Call]:
        """Where the script starts processes itself."""
        script = self.script
        return [c for c in script.calls if script.name(c.func) in SPAWNS or script.last(c.func) in _PROCESSES]

    @cached_property
    def spawned(self) -> frozenset[Function]:
        """The functions that it runs in processes."""
        found: set[Function] = set()
        for call in self.spawns:
            targets = [word.value for word in call.keywords if word.arg in ("target", "fn", "function")]
            for target in targets or call.args[:1]:
                found |= set(self.script.functions.get(self.script.last(target), ()))
        return frozenset(found)

    @cached_property
    def _names(self) -> dict[str, list[ast.AST]]:
        found: dict[str, list[ast.AST]] = {}
        for node in self.script.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.id, []).append(node)
            elif isinstance(node, ast.Attribute):
                found.setdefault(f".{node.attr}", []).append(node)
        return found
