"""Reads from the source file of a line: its text, and the enclosing loop and condition on the rank."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

import msgspec

from phalanx.diagnose.evidence import Frame

_RANK = re.compile(r"rank|is_main|is_master|main_process|is_first|is_leader", re.IGNORECASE)
_LONGEST = 60  # maximum characters of a condition in a sentence


def annotate(frame: Frame, text: str) -> Frame:
    """Return the frame with what its source file shows. Unchanged if the file is not the one that ran."""
    lines = text.splitlines()
    if not 0 < frame.line <= len(lines):
        return frame
    guard, loop = _around(text, frame.line)
    return msgspec.structs.replace(frame, source=lines[frame.line - 1].strip()[:200], guard=guard, loop=loop)


@lru_cache(16)
def _tree(text: str) -> ast.AST | None:
    """Return the parsed file, cached."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(256)
def _around(text: str, line: int) -> tuple[str, int]:
    tree = _tree(text)
    guard, loop = "", 0
    for node in ast.walk(tree) if tree is not None else ():  # from the outside in: the innermost match wins
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and _within(node, line):
            guard, loop = "", 0
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While) and _within(node, line):
            loop = node.lineno
        elif isinstance(node, ast.If) and _within(node, line):
            guard = _asks(node, line) or guard
    return guard, loop


def _asks(node: ast.If, line: int) -> str:
    condition = ast.unparse(node.test)
    if not _RANK.search(condition):
        return ""
    condition = condition if len(condition) <= _LONGEST else f"{condition[: _LONGEST - 1]}…"
    if any(_within(each, line) for each in node.body):
        return f"if {condition}"
    if any(_within(each, line) for each in node.orelse):
        return f"else of if {condition}"
    return ""


def _within(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)
