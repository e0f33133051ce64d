"""Seeds: the same on every rank while the model is made, different per rank afterwards."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: object) -> int:
    """Return a seed by name: `derive(seed, "data", epoch)`. It is the same everywhere and in all versions."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy (if imported) and torch, for every device."""
    import torch

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed is slower: it also stores the seed for devices that may appear
        torch.default_generator.manual_seed(seed)


def generator(seed: int, *names: object) -> torch.Generator:
    """Return a generator on the CPU, as samplers and loaders need it."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))
