"""A file that every rank writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.private_paths import private

NAME = "save-everywhere"


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for `torch.save` to the same path on every rank."""
    if not model.many:
        return
    for call in model.script.calls:
        if model.script.name(call.func) != "torch.save":
            continue
        path = call.args[1] if len(call.args) > 1 else next((w.value for w in call.keywords if w.arg == "f"), None)
        if path is None or private(model, path) or not model.reach.everywhere(call):
            continue
        yield LintFinding(
            call.lineno,
            NAME,
            "error",
            f"every rank writes {ast.unparse(path)} at the same time: a reader may find half a file",
            "if rank == 0: torch.save(…), then barrier() before others read it; or torch.distributed.checkpoint.save "
            "for what is sharded",
            call.end_lineno or 0,
        )
