"""Converts plain values to JSON and back: types that JSON lacks are tagged, tensors are stored separately, and other
types are rejected.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format.tensorfile import dtype_of

Tensors = dict[str, torch.Tensor]


def packed(value: Any, path: str, tensors: Tensors) -> Any:
    """Return the value as JSON. Tensors in it are added to `tensors`, under their path."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            kind = "on the meta device" if value.is_meta else f"{value.layout}, {value.dtype}"
            raise CheckpointError(
                f"{path} is a tensor that cannot be saved: {kind}",
                details=["expected a dense tensor that has values"],
                fix="leave it out of state_dict(), or make it dense: tensor.to_dense()",
            )
        while path in tensors:  # {1: …, "1": …}
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a NumPy scalar
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        # Most readers of JSON support 64 bits.
        return int(value) if -(2**63) <= value < 2**63 else {"$int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: packed(item, f"{path}.{key}", tensors) for key, item in value.items()}
        pairs = [[packed(k, f"{path}.key", tensors), packed(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        return {"$dict": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [packed(item, f"{path}.{place}", tensors) for place, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple": items} if isinstance(value, tuple) else {"$set": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path} is a {kind}, which cannot be saved",
        details=["expected numbers, strings, bytes, lists, tuples, sets, dicts of them, or tensors"],
        fix="leave it out of state_dict(), or turn it into one of those",
    )


def unpacked(value: Any, tensors: Tensors) -> Any:
    """Return the value that `packed` converted to JSON."""
    if isinstance(value, list):
        return [unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag == "$tensor":
            return tensors[body]
        if tag == "$dict":
            return {unpacked(key, tensors): unpacked(item, tensors) for key, item in body}
        if tag in _TAGS:
            return _TAGS[tag](unpacked(body, tensors))
    return {key: unpacked(item, tensors) for key, item in value.items()}


def tensor_names(value: Any) -> set[str]:
    """Return the names of the separately stored tensors."""
    if isinstance(value, list):
        return {name for item in value for name in tensor_names(item)}
    if isinstance(value, dict):
        if set(value) == {"$tensor"}:
            return {value["$tensor"]}
        return {name for item in value.values() for name in tensor_names(item)}
    return set()


_TAGS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$float": float,
    "$int": int,
    "$bytes": base64.b64decode,
    "$dtype": dtype_of,
    "$device": torch.device,
}
