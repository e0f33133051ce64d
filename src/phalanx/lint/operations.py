"""Operations that all ranks must perform together: collectives, group creation, steps of a wrapped model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.lint.script import Function, Script

Kind = Literal["collective", "group", "model"]

_TORCH = {  # position of the group argument, if it is not a keyword
    "all_reduce": 2,
    "all_reduce_coalesced": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_single": 2,
    "all_gather_object": 2,
    "all_gather_coalesced": 2,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "reduce_scatter_single": 3,
    "scatter": 3,
    "scatter_object_list": 3,
    "gather": 3,
    "gather_object": 3,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "monitored_barrier": 0,
}
_GROUPS = frozenset(["new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh"])
_CHECKPOINT = frozenset(["save", "load", "async_save", "save_state_dict", "load_state_dict"])
_ACCELERATE = frozenset(
    ["gather", "gather_object", "broadcast", "broadcast_object_list", "reduce", "pad_across_processes"]
)
_METHODS = {  # methods of library objects that every rank must call
    "accelerator": frozenset(
        [
            "gather",
            "gather_for_metrics",
            "reduce",
            "pad_across_processes",
            "wait_for_everyone",
            "prepare",
            "backward",
            "save_state",
            "load_state",
            "check_trigger",
        ]
    ),
    "fabric": frozenset(
        ["barrier", "all_gather", "all_reduce", "broadcast", "backward", "save", "load", "setup", "setup_module"]
    ),
    "trainer": frozenset(["fit", "validate", "test", "predict", "save_checkpoint", "train", "evaluate"]),
    "strategy": frozenset(["barrier", "broadcast", "reduce", "all_gather", "all_reduce"]),
    "run": frozenset(["step", "backward", "keep", "save", "checkpoint", "wrap", "loader", "evaluate"]),
    "group": frozenset(["barrier", "mean", "sum", "max", "broadcast", "gather", "first"]),
}
_MAKERS = {"Accelerator": "accelerator", "PartialState": "accelerator", "Fabric": "fabric", "Trainer": "trainer"}
_LIBRARIES = {  # usual variable names of library objects
    "accelerator": ("accelerate",),
    "fabric": ("lightning", "lightning_fabric"),
    "trainer": ("lightning", "pytorch_lightning"),
    "strategy": ("lightning", "lightning_fabric", "pytorch_lightning"),
    "run": ("phalanx",),
    "group": ("phalanx",),
}
_DDP = ("DistributedDataParallel", "DDP")
_FSDP = ("FullyShardedDataParallel", "FSDP")


@dataclass(frozen=True)
class RankOperation:
    """A call that involves other ranks."""

    node: ast.Call
    op: str  # all_reduce
    kind: Kind = "collective"
    part: bool = False  # in a separate group: only its ranks must call it
    via: str = ""  # the function of this file that is called here and performs the operation
    quiet: bool = False  # without gradients: DDP then communicates only for a model with buffers

    @property
    def what(self) -> str:
        """The name of the operation, with the function that calls it."""
        return f"{self.op} (in {self.via}())" if self.via else self.op


class Operations:
    """All calls of a script that involve other ranks."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._at: dict[ast.Call, tuple[RankOperation, ...]] = {}
        self._of: dict[Function, tuple[RankOperation, ...]] = {}
        self._wraps = any(self._wrapper(call) for call in script.calls)

    def at(self, call: ast.Call) -> tuple[RankOperation, ...]:
        """Return the operation that a call performs, directly or through a function of this file."""
        if call not in self._at:
            one = self._direct(call)
            self._at[call] = (one,) if one is not None else tuple(self._by_function(call))
        return self._at[call]

    def all(self) -> Iterator[RankOperation]:
        """Yield all operations of the script."""
        for call in self.script.calls:
            yield from self.at(call)

    def below(self, *nodes: ast.AST) -> Iterator[RankOperation]:
        """Yield the operations inside these nodes."""
        for node in self.script.inside(*nodes):
            if isinstance(node, ast.Call):
                yield from self.at(node)

    # -- one call

    def _direct(self, call: ast.Call) -> RankOperation | None:
        name, last = self.script.name(call.func), self.script.last(call.func)
        if name.startswith("torch.distributed.checkpoint."):
            alone = any(word.arg in ("no_dist", "process_group") for word in call.keywords)
            return RankOperation(call, f"checkpoint.{last}", part=alone) if last in _CHECKPOINT else None
        if name.startswith("torch.distributed.") and not name.startswith("torch.distributed.rpc."):
            if last in _GROUPS:
                local = any(word.arg == "use_local_synchronization" for word in call.keywords)
                return RankOperation(call, last, "group", part=local)
            if last == "init_process_group":
                # With an explicit size, it may be a world of some ranks only.
                return RankOperation(call, last, part=any(word.arg == "world_size" for word in call.keywords))
            if last in _TORCH:
                return RankOperation(call, last, part=_in_part(call, last))
        if name.startswith("accelerate.utils.") and last in _ACCELERATE:
            return RankOperation(call, last)
        if isinstance(call.func, ast.Attribute) and last in _METHODS.get(self.holder(call.func.value), ()):
            kind: Kind = "model" if last in ("backward", "step") else "collective"
            return RankOperation(call, last, kind)
        if self.is_wrap(call) == "ddp":
            return RankOperation(call, "DistributedDataParallel", "model", part=_in_part(call, last))
        return self._of_model(call, last)

    def _of_model(self, call: ast.Call, last: str) -> RankOperation | None:
        """Return the operation on a wrapped model: forward and backward, or the state of a sharded one."""
        if not self._wraps:
            return None
        quiet = self._quiet(call)
        if wrapped := self.wrapped(call.func, call):
            return None if wrapped == "run" and quiet else RankOperation(call, "forward", "model", quiet=quiet)
        if not isinstance(call.func, ast.Attribute):
            return None
        if last == "state_dict" and self.wrapped(call.func.value, call) == "fsdp":
            return RankOperation(call, "state_dict", "model")
        if last == "export" and self.wrapped(call.func.value, call) == "run":
            return RankOperation(call, "export")
        if last == "backward" and self._follows(call.func.value, call, 4):
            return RankOperation(call, "backward", "model")
        return None

    def _follows(self, value: ast.AST, where: ast.AST, depth: int) -> bool:
        """Return whether a value is computed from the output of a wrapped model."""
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and self.wrapped(node.func, node):
                return True
            if depth and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                before = [one for one in self.script.lookup(node) if one.line < getattr(where, "lineno", 0)]
                latest = max(before, key=lambda one: one.line, default=None)
                value_ = latest.value if latest is not None and latest.kind == "value" else None
                if value_ is not None and self._follows(value_, value_, depth - 1):
                    return True
        return False

    def _by_function(self, call: ast.Call) -> Iterator[RankOperation]:
        function = self.script.called(call)
        if function is None:
            return
        if function not in self._of:
            self._of[function] = ()  # a function that calls itself
            found = {}
            for node in self.script.inside(*function.body):
                if isinstance(node, ast.Call) and (one := self._direct(node)) is not None:
                    found[one.op, one.part] = one
            self._of[function] = tuple(found.values())
        for one in self._of[function]:
            yield replace(one, node=call, via=function.name)
        yield from self._handed(call, function)

    def _handed(self, call: ast.Call, function: Function) -> Iterator[RankOperation]:
        """Return the operation if a wrapped model is passed to a function that calls it."""
        names = [argument.arg for argument in function.args.args]
        if names[:1] == ["self"]:
            names = names[1:]
        given = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
        for name, value in given:
            wrapped = self.wrapped(value, call)
            if not wrapped:
                continue
            for node in self.script.inside(*function.body):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                    quiet = self._quiet(node) or self._quiet(call)
                    if not (wrapped == "run" and quiet):
                        yield RankOperation(call, "forward", "model", via=function.name, quiet=quiet)
                    break

    # -- what things are

    def holder(self, node: ast.expr) -> str:
        """Return the kind of a library object: accelerator, fabric, trainer, strategy, run, group; empty: none."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return ""
        for one in self.script.lookup(node):
            if isinstance(one.value, ast.Call) and one.kind == "value":
                if made := _MAKERS.get(self.script.last(one.value.func)):
                    return made
                return {"phalanx.init": "group", "phalanx.Run": "run"}.get(self.script.name(one.value.func), "")
            if isinstance(one.value, ast.Attribute) and one.kind == "value" and one.value.attr == "group":
                return self.holder(one.value)  # group = run.group
        name = self.script.last(node).lstrip("_")
        return name if name in _LIBRARIES and self.script.uses(*_LIBRARIES[name]) else ""

    def _wrapper(self, call: ast.Call) -> str:
        last = self.script.last(call.func)
        if last in (*_DDP, *_FSDP):
            return "" if _in_part(call, last) else "ddp" if last in _DDP else "fsdp"
        if not isinstance(call.func, ast.Attribute):
            return ""
        how = {"prepare": "accelerator", "setup": "fabric", "setup_module": "fabric", "wrap": "run"}.get(last)
        if how is None or self.holder(call.func.value) != how:
            return ""
        return "run" if how == "run" else "ddp"

    def is_wrap(self, call: ast.Call) -> str:
        """Return "ddp" if a call wraps a model with the DDP of torch."""
        return "ddp" if self.script.last(call.func) in _DDP and call.args else ""

    def wrapped(self, node: ast.expr, where: ast.AST) -> str:
        """Return how a model was wrapped: ddp, fsdp, run; empty: it was not."""
        if not self._wraps or not isinstance(node, ast.Name | ast.Attribute):
            return ""
        line = getattr(where, "lineno", 0)
        found = [one for one in self.script.lookup(node) if one.kind == "value"]
        before = [one for one in found if one.line < line] if isinstance(node, ast.Name) else found
        # A function may use names that are bound below it.
        latest = sorted(before or found, key=lambda one: one.line)
        for one in reversed(latest):
            arms = [one.value.body, one.value.orelse] if isinstance(one.value, ast.IfExp) else [one.value]
            for arm in arms:
                if isinstance(arm, ast.Call):
                    if how := self._wrapper(arm):
                        return how if one in before else ""
                    if self.script.last(arm.func) == "compile" and arm.args:
                        break  # it still has its earlier value
            else:
                if isinstance(node, ast.Name):
                    return ""
        return ""

    def _quiet(self, node: ast.AST) -> bool:
        """Return whether the call is under no_grad."""
        for above in self.script.above(node):
            marks: list[ast.expr] = []
            if isinstance(above, ast.With):
                marks = [item.context_expr for item in above.items]
            elif isinstance(above, ast.FunctionDef):
                marks = above.decorator_list
            for mark in marks:
                if self.script.last(mark.func if isinstance(mark, ast.Call) else mark) in ("no_grad", "inference_mode"):
                    return True
            if isinstance(above, ast.FunctionDef):
                return False
        return False


def _in_part(call: ast.Call, op: str) -> bool:
    """Return whether the call uses a group that is not the world."""
    for word in call.keywords:
        if word.arg in ("group", "process_group", "pg", "device_mesh"):
            return _not_world(word.value)
    place = _TORCH.get(op)
    if place is not None and len(call.args) > place:
        return _not_world(call.args[place])
    return any("group" in ast.unparse(value).lower() and _not_world(value) for value in call.args[1:])


def _not_world(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is not None
    return not ast.unparse(value).endswith(("WORLD", "_get_default_group()"))
