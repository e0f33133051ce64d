"""The state of every random number generator of a rank, as plain values."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch


def taken() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": [version, list(words), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.get_state()
        if name == "MT19937":
            state["numpy"] = [[int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return state


def restore(state: dict[str, Any]) -> None:
    """What was taken; a generator that was not there then stays as it is."""
    if "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    numpy = sys.modules.get("numpy.random")
    if "numpy" in state and numpy is not None:
        keys, position, has_gauss, cached = state["numpy"]
        numpy.set_state(("MT19937", keys, position, has_gauss, cached))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
