"""How the installed torch was built, without importing it, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def read() -> dict[str, str]:
    """Parse torch/version.py and return its values. Empty: torch is not installed."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return {}
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            return assignments(Path(folder, "version.py").read_text())
        except (OSError, SyntaxError, UnicodeError):
            continue
    return {}


def assignments(text: str) -> dict[str, str]:
    """Return the plain strings that a module assigns, by name."""
    found = {}
    for line in ast.parse(text).body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            name = line.targets[0].id
        elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name = line.target.id
        else:
            continue
        if isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            found[name] = line.value.value
    return found
