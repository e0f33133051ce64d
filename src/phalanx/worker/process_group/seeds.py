"""Seeds: the same on every rank while the model is made, different per rank afterwards."""

from __future__ import annotations

import hashlib
import operator
import random
import sys
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch


def check(seed: Any) -> None:
    """Raise UsageError unless this is a whole number."""
    try:
        operator.index(seed)
    except TypeError:
        raise UsageError(f"seed={seed!r}: expected a whole number", fix="seed=1") from None


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


class RankGenerator:
    """A random generator for one rank alone, on the CPU, as samplers and loaders need it."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed = derive(seed, "generator", rank)
        self._due = True  # seeded on use: seeding takes too long for every small step
        self._torch: torch.Generator | None = None

    def seed(self, value: int) -> None:
        """Seed it with `value` before it is used again."""
        self._seed, self._due = value, True

    def get(self) -> torch.Generator:
        """Return the generator, seeded."""
        import torch

        if self._torch is None:
            self._torch = torch.Generator()
        if self._due:
            self._due = False
            self._torch.manual_seed(self._seed)
        return self._torch
