"""The key that gives a browser access, and the cookie that it gets in exchange.

Both are random. Comparing them takes the same time for every wrong value.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from phalanx.contract.variables import PAGE_KEY
from phalanx.errors import UsageError

_OWN = re.compile(r"[0-9a-fA-F]{32,256}")


def new(given: str = "") -> str:
    """Return a new key of 256 bits, or the given one after a check. Raises UsageError."""
    if not given:
        return secrets.token_urlsafe(32)
    if not _OWN.fullmatch(given):
        raise UsageError(
            f"{PAGE_KEY} is not a valid key: {len(given)} characters",
            details=["expected: at least 32 hexadecimal digits"],
            fix=f"export {PAGE_KEY}=$(openssl rand -hex 32)",
        )
    return given


@dataclass(frozen=True)
class PageKeys:
    """The key of a page and what is derived from it."""

    key: str
    port: int
    run: str = ""

    @property
    def cookie_name(self) -> str:
        """Return the name of the cookie. It is unique per page: browsers send the cookies of a host to all its ports,
        and with ssh -L many machines are one host.
        """
        return f"phalanx_{self.port}_{self._derived('name')[:8]}"

    @property
    def cookie(self) -> str:
        """Return the cookie: derived from the key, which many runs may share, for this port and run only.

        It stays valid when the server is restarted.
        """
        return self._derived("cookie")

    @property
    def folder(self) -> str:
        """The path below which the cookie is valid.

        Other servers on this host cannot guess it, so they never get the cookie.
        """
        return self._derived("folder")[:32]

    @property
    def token(self) -> str:
        """Return the token that a request that changes something must send in a header, besides the cookie.

        A page of another site can neither read it nor send such a header.
        """
        return self.folder

    def allows(self, token: str | None) -> bool:
        """Return whether `token` is the token."""
        return token is not None and _same(token, self.token)

    def _derived(self, what: str) -> str:
        words = "\0".join(("phalanx page", what, str(self.port), self.run))
        return hmac.new(self.key.encode(), words.encode(errors="replace"), hashlib.sha256).hexdigest()

    def opens(self, key: str) -> bool:
        """Return whether `key` is the key."""
        return _same(key, self.key)

    def within(self, path: str) -> str:
        """Return `path` without the folder, if it begins with it."""
        first, slash, rest = path[1:].partition("/")
        return f"/{rest}" if slash and _same(first, self.folder) else path

    def knows(self, cookie: str | None) -> bool:
        """Return whether `cookie` is the cookie."""
        return cookie is not None and _same(cookie, self.cookie)


def _same(one: str, other: str) -> bool:
    # Compare digests, so that the time does not depend on the length.
    digests = (hashlib.sha256(word.encode(errors="replace")).digest() for word in (one, other))
    return hmac.compare_digest(*digests)
