"""A process group that is never destroyed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "no-destroy"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield a finding if the process group is never destroyed."""
    ends = ("destroy_process_group", "_abort_process_group", "abandon")
    if any(isinstance(n, ast.Name | ast.Attribute) and model.script.last(n) in ends for n in model.script.nodes):
        return
    if model.driven:
        return
    for call in model.calls("init_process_group"):
        if model.script.name(call.func).startswith(("torch.distributed", "init_")) and _reached(model, call):
            yield LintFinding(
                call.lineno,
                NAME,
                "warning",
                "no rank destroys this group: a rank that exits early can make the others fail or hang",
                "torch.distributed.destroy_process_group() at the end",
                call.end_lineno or 0,
            )
            return


def _reached(model: Model, call: ast.Call) -> bool:
    return model.reach.everywhere(call)
