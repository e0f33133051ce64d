"""A folder or a download that all ranks create at the same time."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model
from phalanx.lint.private_paths import private

NAME = "file-race"
_DOWNLOADS = ("urllib.request.urlretrieve", "wget.download", "gdown.download", "torch.hub.download_url_to_file")


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for files and folders that all ranks create."""
    if not model.many:
        return
    for call in model.script.calls:
        path = _folder(model, call)
        if path is not None:
            reason = "every rank makes the folder: all but the first fail, also behind a check that it does not exist"
            fix = "exist_ok=True"
        elif _downloads(model, call):
            reason = "every rank downloads to the same place at the same time, and may read half a file of another's"
            fix = "let the first rank of each node do it, and a barrier() after it: the others only read"
        else:
            continue
        if (path is not None and private(model, path)) or _caught(model, call) or _first(model, call):
            continue
        if model.reach.everywhere(call):
            yield LintFinding(call.lineno, NAME, "warning", reason, fix, call.end_lineno or 0)


def _folder(model: Model, call: ast.Call) -> ast.expr | None:
    name = model.script.name(call.func)
    given = {word.arg for word in call.keywords}
    if name in ("os.makedirs", "os.mkdir") and "exist_ok" not in given and len(call.args) in (1, 2):
        return call.args[0]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "mkdir" and not name.startswith("os."):
        known = isinstance(call.func.value, ast.Call) or model.script.uses("pathlib")
        return call.func.value if "exist_ok" not in given and known else None
    return None


def _downloads(model: Model, call: ast.Call) -> bool:
    if model.script.name(call.func) in _DOWNLOADS:
        return True
    asked = any(
        w.arg == "download" and isinstance(w.value, ast.Constant) and w.value.value is True for w in call.keywords
    )
    return asked and "datasets" in model.script.name(call.func)


def _caught(model: Model, call: ast.Call) -> bool:
    return any(isinstance(above, ast.Try) for above in model.script.above(call))


def _first(model: Model, call: ast.Call) -> bool:
    """Return whether it is inside `with accelerator.main_process_first():`, `with group.first():` or a lock."""
    return any(
        "first" in ast.unparse(item.context_expr).lower() or "lock" in ast.unparse(item.context_expr).lower()
        for above in model.script.above(call)
        if isinstance(above, ast.With)
        for item in above.items
    )
