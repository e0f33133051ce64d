"""The random state of a rank: all generators, as plain values."""

from __future__ import annotations

import base64
import ctypes
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.worker.process_group import seeds


def taken(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return the current state. This is cheap, because the training waits; `packed` converts it to JSON."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state["numpy"] = numpy.get_state()
    state["generators"] = [generator.get_state() for generator in generators]
    return state


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as JSON."""
    version, words, gauss = state["python"]
    found = {"torch": _text(state["torch"]), "python": [version, list(words), gauss]}
    if "cuda" in state:
        found["cuda"] = _text(state["cuda"])
    if "numpy" in state and state["numpy"][0] == "MT19937":
        _, keys, position, has_gauss, cached = state["numpy"]
        found["numpy"] = [keys.tolist(), int(position), int(has_gauss), float(cached)]
    found["generators"] = [_text(one) for one in state["generators"]]
    return found


def restore(saved: Sequence[dict[str, Any]], rank: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Restore the state of this rank. A rank that did not exist then gets a state that no other rank has or had."""
    if rank >= len(saved):
        seed = seeds.derive(0, rank, *(state["torch"] for state in saved))
        seeds.seed_all(seed)
        for place, generator in enumerate(generators):
            generator.manual_seed(seeds.derive(seed, place))
        return
    state = saved[rank]
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    numpy = sys.modules.get("numpy.random")
    if "numpy" in state and numpy is not None:
        keys, position, has_gauss, cached = state["numpy"]
        numpy.set_state(("MT19937", keys, position, has_gauss, cached))
    for generator, one in zip(generators, state["generators"], strict=False):
        generator.set_state(_tensor(one))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(ctypes.string_at(state.data_ptr(), state.nbytes)).decode()  # a list takes 20 times as long


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
