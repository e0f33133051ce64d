"""torch's options, also where what is in them was given alone: a root, an operation, a time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


def asked(kind: type[Any], opts: Any, timeout: timedelta | None = None, **fields: Any) -> Any:
    if isinstance(opts, kind):
        return opts
    options = kind()
    if isinstance(opts, timedelta):
        timeout = opts
    elif opts is not None:
        fields["rootRank" if isinstance(opts, int) else "reduceOp"] = opts
    for name, value in {**fields, "timeout": timeout}.items():
        if value is not None:
            setattr(options, name, value)
    return options


def listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
