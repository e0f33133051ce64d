"""Random numbers for reading data, apart from those of the training, so that a resumed run draws the same numbers.

    numbers = RngState(seed)
    with numbers.drawn():          # the same numbers everywhere for this seed
        sample = next(samples)

These are the global generators that a data set draws from: Python's, NumPy's (if imported) and torch's on the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def number(*parts: int) -> int:
    """Return a seed that is unique to these parts."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def seed(value: int) -> None:
    """Seed the generators of this process. torch.manual_seed is slower: it also seeds devices."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(value % (1 << 32))


def state(device: Any) -> Any:
    """Return the state of all generators that a script draws from, on the CPU and on its device."""
    far = torch.cuda.default_generators[device.index].get_state() if device.type == "cuda" else None
    return (*_state(), far)


def set_state(state: Any, device: Any) -> None:
    """Restore the result of `state`."""
    *near, far = state
    _restore((near[0], near[1], near[2]))
    if far is not None:
        torch.cuda.default_generators[device.index].set_state(far)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Restore the state of the generators at the end."""
    before = _state()
    try:
        yield
    finally:
        _restore(before)


class FreshRng:
    """Seeds the generators of the training for every batch: torch's, and those of Python and NumPy that the first batch
    and its step have used. Seeding all of them would take too long for a small step."""

    def __init__(self) -> None:
        self.drawn: list[str] | None = None  # generators in use, besides torch's; None: no step was committed yet
        self._before: tuple[Any, Any] | None = None  # at the first batch
        self._others: list[str] | None = None

    def begin(self, value: int, device: Any) -> None:
        """Seed for a batch."""
        torch.default_generator.manual_seed(value)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(value)
        others = self.drawn if self.drawn is not None else self._others
        if others is None:
            if self._before is None:
                self._before = _others()
                return
            others = self._others = self._look()
        if others:
            if "python" in others:
                random.seed(value)
            if "numpy" in others and (numpy := sys.modules.get("numpy.random")) is not None:
                numpy.seed(value % (1 << 32))

    def settle(self) -> None:
        """Fix which generators are seeded, after the first committed step. Checkpoints contain it."""
        if self.drawn is None and self._before is not None:
            self.drawn = self._others if self._others is not None else self._look()

    def _look(self) -> list[str]:
        pairs = zip(("python", "numpy"), self._before or (), _others(), strict=True)
        return [name for name, before, now in pairs if before != now]


def _others() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), _words(numpy and numpy.get_state())


class RngState:
    """A separate random stream, which continues where it was left."""

    def __init__(self, value: int) -> None:
        with untouched():
            seed(value)
            self._state = self._first = _state()

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this stream within the context."""
        with untouched():
            _restore(self._state)
            yield
            self._state = _state()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; usually empty, because nothing was drawn. It is sent with every batch."""
        python, torchs, numpys = self._state
        if (
            python == self._first[0]
            and torch.equal(torchs, self._first[1])
            and _words(numpys) == _words(self._first[2])
        ):
            return {}
        return {"python": python, "torch": bytes(torchs.tolist()), "numpy": _words(numpys)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        if not state:
            return
        version, words, gauss = state["python"]
        numpys = self._first[2]
        if numpys is not None and state["numpy"] is not None:
            words_there, *more = state["numpy"]
            numpys = (numpys[0], sys.modules["numpy"].array(words_there, dtype="uint32"), *more)
        torchs = torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8)
        self._state = (version, tuple(words), gauss), torchs, numpys


def _state() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), torch.default_generator.get_state(), numpy and numpy.get_state()


def _words(numpys: Any) -> list[Any] | None:
    """Return NumPy's state without its name."""
    return numpys and [numpys[1].tolist(), *numpys[2:]]


def _restore(state: tuple[Any, Any, Any]) -> None:
    python, torchs, numpys = state
    random.setstate(python)
    torch.default_generator.set_state(torchs)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)
