"""A store of torch.distributed whose values carry a MAC, so that only ranks of this run can write them.

store = SignedStore(torch_store, "phalanx/run-1.0/1")     # the place: a value is valid for one key at one place
store.set("here/0", value)
store.get("here/0")                                        # raises ForgedValueError if another process has set it

The key of a run comes from its agent, by a file in the run folder that only its user can read. Ranks that another
launcher has started have none: then values are stored as they are. Counters (`add`) cannot carry a MAC.

Standard library only, like everything here: a worker loads it by path.
"""

from __future__ import annotations

import contextlib
import copy
import hmac
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

KEY_FILE = "store-key"  # in the run folder
_RUN_FOLDER = "PHALANX_RUN_FOLDER"
_MAC_SIZE = 64  # bytes: SHA-256, in hexadecimal
_given: bytes | None = None


class ForgedValueError(RuntimeError):
    """A value in the store was not written by a rank of this run. A RuntimeError, as torch's own errors of stores."""


def use_key(key: bytes) -> None:
    """Set the key of this process: for ranks of `phalanx.spawn`, which have no run folder."""
    global _given
    _given = key


def run_key() -> bytes | None:
    """Return the key of this run. None: the launcher has given none."""
    if _given is not None:
        return _given
    folder = os.environ.get(_RUN_FOLDER)
    if not folder:
        return None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(os.path.join(folder, KEY_FILE)) as file:
        return bytes.fromhex(file.read()) or None
    return None


def write_key(folder: str, key: bytes) -> None:
    """Write the key for the workers of this node. An existing key is kept."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        fd = os.open(os.path.join(folder, KEY_FILE), flags, 0o600)
        with open(fd, "w") as file:
            file.write(key.hex())


class SignedStore:
    """The methods of a store that phalanx uses. `place` is the purpose of the store: it is part of every MAC.

    `key`: default (None): the key of this run.
    """

    def __init__(self, torch_store: Any, place: str, key: bytes | None = None) -> None:
        self.torch_store = torch_store
        self._place = place
        self._key = run_key() if key is None else key
        self._prefix = ""

    def at(self, name: str) -> SignedStore:
        """Return the store for keys below this name."""
        found = copy.copy(self)
        found._prefix = f"{self._prefix}{name}/"
        return found

    def torch_prefix(self, name: str) -> Any:
        """Return a store for torch itself, for keys below this name."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self._prefix}{name}", self.torch_store)

    def clone(self) -> SignedStore:
        """Return the same store with another connection."""
        found = copy.copy(self)
        found.torch_store = self.torch_store.clone()
        return found

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self.torch_store.set(self._prefix + key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value; wait until it is set."""
        return self._checked(key, self.torch_store.get(self._prefix + key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, in one request if the store supports it."""
        if not self.torch_store.has_extended_api():
            return [self.get(key) for key in keys]
        found = self.torch_store.multi_get([self._prefix + key for key in keys])
        return [self._checked(key, value) for key, value in zip(keys, found, strict=True)]

    def set_first(self, key: str, value: str) -> bytes:
        """Set the value unless another rank has set one. Return the value that is set."""
        signed = self._signed(key, value).decode()
        return self._checked(key, self.torch_store.compare_set(self._prefix + key, "", signed))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum."""
        return int(self.torch_store.add(self._prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self.torch_store.check([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are set."""
        self.torch_store.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self.torch_store.delete_key(self._prefix + key))

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return self._mac(key, content) + content if self._key else content

    def _checked(self, key: str, value: Any) -> bytes:
        found = bytes(value, "utf-8") if isinstance(value, str) else bytes(value)
        if not self._key:
            return found
        content = found[_MAC_SIZE:]
        if not hmac.compare_digest(found[:_MAC_SIZE], self._mac(key, content)):
            raise ForgedValueError(
                f"{self._prefix}{key} in the store of this run was not set by one of its ranks: "
                "another process can write to the store"
            )
        return content

    def _mac(self, key: str, content: bytes) -> bytes:
        """Return the MAC in hexadecimal: the store compares text only."""
        where = "\0".join((self._place, self._prefix + key)).encode()
        text = len(where).to_bytes(8, "big") + where + content
        return hmac.digest(self._key or b"", text, "sha256").hex().encode()
