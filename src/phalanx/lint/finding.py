"""The result of a rule: where, why it is wrong, what to write instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class LintFinding:
    """Error: hangs, or produces a wrong result. Warning: does so in some cases, or wastes resources."""

    line: int
    rule: str
    level: Level
    reason: str
    fix: str
    last: int = 0  # last line of the reported code: a comment there counts too
    file: str = ""
