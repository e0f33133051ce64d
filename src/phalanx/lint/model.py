"""What the rules query about a script."""

from __future__ import annotations

import ast
from functools import cached_property

from phalanx.lint.divergence import Divergences
from phalanx.lint.operations import Operations
from phalanx.lint.origin import Origin
from phalanx.lint.ranks import chance, ranks, worlds
from phalanx.lint.reach import CodeReach
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
    """Answers the queries of the rules about a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.operations = Operations(script)
        self.divergences = Divergences(script, self.operations)

    @cached_property
    def ranks(self) -> Origin:
        """Where values depend on the rank."""
        return ranks(self.script)

    @cached_property
    def worlds(self) -> Origin:
        """Where values depend on the world size."""
        return worlds(self.script)

    @cached_property
    def chance(self) -> Origin:
        """Where values are random."""
        return chance(self.script)

    @cached_property
    def reach(self) -> CodeReach:
        """Which code every rank reaches."""
        return CodeReach(self.script, self.ranks, self.divergences)

    @cached_property
    def distributed(self) -> bool:
        """Whether the script uses several ranks at all."""
        names = ("torch.distributed.", "torch.nn.parallel.DistributedDataParallel")
        return self.script.uses(*_DISTRIBUTED) or any(
            self.script.name(node).startswith(names) for node in self.script.nodes if isinstance(node, ast.Attribute)
        )

    @cached_property
    def joins(self) -> bool:
        """Whether it joins a process group with calls of torch."""
        starts = self.calls("init_process_group")
        if any(map(_pretends, starts)):
            return False
        return bool(starts) or any(self.operations.is_wrap(call) for call in self.script.calls)

    @cached_property
    def driven(self) -> bool:
        """Whether a library handles devices, data and groups."""
        classes = [node for node in self.script.nodes if isinstance(node, ast.ClassDef)]
        bases = {self.script.last(base) for node in classes for base in node.bases}
        if bases & {"LightningModule", "LightningDataModule"}:
            return True
        if any(self.script.name(call.func) in ("phalanx.main", "phalanx.init") for call in self.script.calls):
            return True
        return any(not _single(call) for call in self.calls("Accelerator", "PartialState", "Fabric", "Trainer"))

    @property
    def many(self) -> bool:
        """Whether there may be more than one rank."""
        return self.joins or self.driven

    def calls(self, *names: str) -> list[ast.Call]:
        """Return calls by the last part of their name."""
        return [call for call in self.script.calls if self.script.last(call.func) in names]


def _pretends(call: ast.Call) -> bool:
    """Return whether a group has only one process or is fake."""
    words = [*call.args, *(word.value for word in call.keywords if word.arg == "backend")]
    if any(isinstance(word, ast.Constant) and word.value in ("fake", "threaded") for word in words):
        return True
    return any(
        w.arg == "world_size" and isinstance(w.value, ast.Constant) and w.value.value == 1 for w in call.keywords
    )


def _single(call: ast.Call) -> bool:
    given = {word.arg: word.value for word in call.keywords}
    devices = given.get("devices")
    return isinstance(devices, ast.Constant) and devices.value == 1 and "num_nodes" not in given
