"""Keys and values that all ranks share: the store of torch.distributed, with a prefix for the run.

group.store.set("best", "0.93")
group.store.wait("ready")
tickets = group.store.add("tickets", 1)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from phalanx.errors import JoinError


class Store:
    """`group.store`: values are strings or bytes, and are returned as bytes."""

    def __init__(self, torch_store: Any, timeout: float) -> None:
        self.torch_store = torch_store  # for torch: new groups, RPC
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """`group.store.set(key, value)`: set a value."""
        self.torch_store.set(key, value)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """`group.store.get(key)`: return a value; wait until it is set."""
        self.wait(key, timeout=timeout)
        return bytes(self.torch_store.get(key))

    def add(self, key: str, amount: int = 1) -> int:
        """`group.store.add(key, 1)`: add to a number, which starts at 0, and return the sum."""
        return int(self.torch_store.add(key, amount))

    def check(self, *keys: str | Sequence[str]) -> bool:
        """`group.store.check(key)`: return whether all keys are set, without waiting. It takes a list, as in torch."""
        return bool(self.torch_store.check(_flat(keys)))

    def wait(self, *given: str | Sequence[str], timeout: float | None = None) -> None:
        """`group.store.wait(key)`: wait until all keys are set. `timeout`: seconds. Default: that of the run.

        A list of keys is accepted, as in torch.
        """
        keys = _flat(given)
        limit = self.timeout if timeout is None else timeout
        start, pause = time.monotonic(), 0.0005
        # Poll: torch's `wait` blocks signals, and prints warnings at a timeout.
        while not self.check(*keys):
            if time.monotonic() - start > limit:
                missing = [key for key in keys if not self.check(key)]
                raise JoinError(f"{', '.join(map(repr, missing))} was not set in the store in {limit:g} s")
            time.sleep(pause)
            pause = min(pause * 1.4, 0.02)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """`group.store.compare_set(key, expected, value)`: set the value if it is `expected`; "": if it is not set.

        Returns the value afterwards; b"": still not set.
        """
        found = bytes(self.torch_store.compare_set(key, expected, value))
        # torch returns `expected` for a key that is not set.
        return b"" if found == expected.encode() != value.encode() else found

    def delete(self, key: str) -> bool:
        """`group.store.delete(key)`: delete a key; return whether it existed."""
        return bool(self.torch_store.delete_key(key))


def _flat(keys: Sequence[str | Sequence[str]]) -> list[str]:
    return [key for given in keys for key in ([given] if isinstance(given, str) else given)]
