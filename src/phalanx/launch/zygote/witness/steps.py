"""Counts the steps of any script: whatever optimizer it has, it steps."""

from __future__ import annotations

import sys
import time
from typing import Any

from . import page

_page: page.Page | None = None


def count(own: page.Page) -> None:
    """Of the first optimizer that steps: a script with two of them counts as one step what it does with both."""
    global _page
    _page = own
    optimizers = sys.modules.get("torch.optim.optimizer")
    if optimizers is None:
        return
    state: dict[str, Any] = {"first": 0, "steps": 0}

    def stepped(optimizer: Any, *_: Any) -> None:
        if _page is None:
            return
        if not state["first"]:
            state["first"] = id(optimizer)
        if id(optimizer) == state["first"]:
            state["steps"] += 1
            _page.step(state["steps"], time.monotonic_ns())

    optimizers.register_optimizer_step_post_hook(stepped)


def forget() -> None:
    global _page
    _page = None
