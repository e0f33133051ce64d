"""Recognizes paths that no other rank uses."""

from __future__ import annotations

import ast

from phalanx.lint.model import Model

_OWN = ("tempfile.", "uuid.", "os.getpid", "io.BytesIO", "socket.gethostname")
_FOLDERS = ("tmp_path", "tmpdir", "tmp_dir", "temp_dir", "buffer", "buf", "bio", "bytes_io", "stream")


def private(model: Model, path: ast.expr) -> bool:
    """Return whether a path contains the rank, is in a private folder, or is not a file."""
    return model.ranks.mentions(path) or _own(model, path, 3) or _given(model, path)


def _own(model: Model, path: ast.AST, depth: int) -> bool:
    for node in ast.walk(path):
        if isinstance(node, ast.Name | ast.Attribute):
            if model.script.name(node).startswith(_OWN) or model.script.last(node) in (*_FOLDERS, "BytesIO"):
                return True
            if depth and any(
                one.value is not None and _own(model, one.value, depth - 1) for one in model.script.lookup(node)
            ):
                return True
    return False


def _given(model: Model, path: ast.expr) -> bool:
    """Return whether the path is a parameter to which a caller passes a path with the rank."""
    scope = model.script.scope(path)
    if not isinstance(scope, ast.FunctionDef):
        return False
    parameters = {argument.arg for argument in scope.args.args}
    if not any(isinstance(node, ast.Name) and node.id in parameters for node in ast.walk(path)):
        return False
    return any(
        model.ranks.mentions(value) or _own(model, value, 3)
        for call in model.calls(scope.name)
        for value in [*call.args, *(word.value for word in call.keywords)]
        if not isinstance(value, ast.Name) or "path" in value.id or "file" in value.id or "dir" in value.id
    )
