"""The key that lets a browser in, and the cookie that it gets for it. Neither can be guessed, nor told from a wrong one
by how long the answer takes."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from phalanx.contract.variables import PAGE_KEY
from phalanx.errors import UsageError

_OWN = re.compile(r"[0-9a-fA-F]{32,256}")


def new(told: str = "") -> str:
    """256 bits, or what the user has said. Raises UsageError."""
    if not told:
        return secrets.token_urlsafe(32)
    if not _OWN.fullmatch(told):
        raise UsageError(
            f"{PAGE_KEY} is no key: {len(told)} characters",
            details=["expected: at least 32 hexadecimal digits"],
            fix=f"export {PAGE_KEY}=$(openssl rand -hex 32)",
        )
    return told


@dataclass(frozen=True)
class PageKeys:
    key: str
    port: int
    run: str = ""

    @property
    def cookie_name(self) -> str:
        """A browser sends cookies of one host to all its ports, and ssh -L makes many machines one host."""
        return f"phalanx_{self.port}_{self._derived('name')[:8]}"

    @property
    def cookie(self) -> str:
        """Not the key itself, which may be that of many runs: of no use at another port, or once the run is over. But
        the same again when the server is another process."""
        return self._derived("cookie")

    @property
    def folder(self) -> str:
        """Under which a browser asks, and the cookie is valid: another server on this host, whom the browser would send
        it as well, on any port, cannot guess the name."""
        return self._derived("folder")[:32]

    def _derived(self, what: str) -> str:
        words = "\0".join(("phalanx page", what, str(self.port), self.run))
        return hmac.new(self.key.encode(), words.encode(errors="replace"), hashlib.sha256).hexdigest()

    def opens(self, key: str) -> bool:
        return _same(key, self.key)

    def within(self, path: str) -> str:
        """The same path without our folder, where it begins with it."""
        first, slash, rest = path[1:].partition("/")
        return f"/{rest}" if slash and _same(first, self.folder) else path

    def knows(self, cookie: str | None) -> bool:
        return cookie is not None and _same(cookie, self.cookie)


def _same(one: str, other: str) -> bool:
    # Of digests, so that not even the length can be told.
    digests = (hashlib.sha256(word.encode(errors="replace")).digest() for word in (one, other))
    return hmac.compare_digest(*digests)
