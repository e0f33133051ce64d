"""Random numbers: the same on every rank where the model is made, a stream of its own for each rank afterwards."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: object) -> int:
    """A seed for something by name: derive(seed, "data", epoch). The same everywhere, for ever."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Python's, NumPy's (where it is in use) and torch's generators, of every device."""
    import torch

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # which takes its time to remember it for devices that may come to be
        torch.default_generator.manual_seed(seed)


def generator(seed: int, *names: object) -> torch.Generator:
    """On the CPU, which is what samplers and loaders take."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))
