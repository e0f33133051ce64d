"""Keys and values that all ranks of a run share: the store of torch.distributed, under the run's own prefix.

run.store.set("best", "0.93")
run.store.wait("ready")
tickets = run.store.add("tickets", 1)
"""

from __future__ import annotations

import time
from typing import Any

from phalanx.errors import JoinError


class Store:
    """Texts and bytes go in, bytes come out."""

    def __init__(self, torch_store: Any, timeout: float) -> None:
        self.torch_store = torch_store  # for what torch wants one: new groups, RPC
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.torch_store.set(key, value)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Waits until somebody has set it."""
        self.wait(key, timeout=timeout)
        return bytes(self.torch_store.get(key))

    def add(self, key: str, amount: int = 1) -> int:
        """The number after adding; it begins at 0."""
        return int(self.torch_store.add(key, amount))

    def check(self, *keys: str) -> bool:
        """Whether all are set; returns at once."""
        return bool(self.torch_store.check(list(keys)))

    def wait(self, *keys: str, timeout: float | None = None) -> None:
        """Until all are set. `timeout`: seconds; the run's own if none is given."""
        limit = self.timeout if timeout is None else timeout
        start, pause = time.monotonic(), 0.0005
        # By looking, for torch's wait holds up signals, and writes warnings when its time is up.
        while not self.check(*keys):
            if time.monotonic() - start > limit:
                missing = [key for key in keys if not self.check(key)]
                raise JoinError(f"nobody has set {', '.join(map(repr, missing))} in the store in {limit:g} s")
            time.sleep(pause)
            pause = min(pause * 1.4, 0.02)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Sets it where it is `expected`; "": where it is not set. Returns what it is then; b"": still not set."""
        found = bytes(self.torch_store.compare_set(key, expected, value))
        # Of a key that is not set torch says that it is what was expected.
        return b"" if found == expected.encode() != value.encode() else found

    def delete(self, key: str) -> bool:
        return bool(self.torch_store.delete_key(key))
