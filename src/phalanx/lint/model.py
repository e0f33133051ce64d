"""What the rules ask about a script."""

from __future__ import annotations

import ast
from functools import cached_property

from phalanx.lint.operations import Operations
from phalanx.lint.origin import Origin
from phalanx.lint.parting import Partings
from phalanx.lint.ranks import chance, ranks, worlds
from phalanx.lint.reach import Reach
from phalanx.lint.script import Script

_DISTRIBUTED = [
    "torch.distributed",
    "torch.nn.parallel",
    "phalanx",
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
]


class Model:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.operations = Operations(script)
        self.partings = Partings(script, self.operations)

    @cached_property
    def ranks(self) -> Origin:
        return ranks(self.script)

    @cached_property
    def worlds(self) -> Origin:
        return worlds(self.script)

    @cached_property
    def chance(self) -> Origin:
        return chance(self.script)

    @cached_property
    def reach(self) -> Reach:
        return Reach(self.script, self.ranks, self.partings)

    @cached_property
    def distributed(self) -> bool:
        """It has to do with other ranks at all."""
        names = ("torch.distributed.", "torch.nn.parallel.DistributedDataParallel")
        return self.script.uses(*_DISTRIBUTED) or any(
            self.script.name(node).startswith(names) for node in self.script.nodes if isinstance(node, ast.Attribute)
        )

    @cached_property
    def joins(self) -> bool:
        """It becomes one of many ranks itself: by torch's own calls."""
        return any(self.script.last(call.func) == "init_process_group" for call in self.script.calls) or any(
            self.operations.is_wrap(call) for call in self.script.calls
        )

    @cached_property
    def driven(self) -> bool:
        """A library deals with devices, data and groups."""
        makers = ("Accelerator", "PartialState", "Fabric", "Trainer", "LightningModule")
        known = {self.script.last(call.func) for call in self.script.calls} | {
            self.script.last(base)
            for node in self.script.nodes
            if isinstance(node, ast.ClassDef)
            for base in node.bases
        }
        return bool(known & set(makers)) or {"phalanx.main", "phalanx.init"} & set(self._called) != set()

    @cached_property
    def _called(self) -> frozenset[str]:
        return frozenset(self.script.name(call.func) for call in self.script.calls)

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls by the last part of their name."""
        return [call for call in self.script.calls if self.script.last(call.func) in names]
