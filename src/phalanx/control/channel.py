"""Authentication: proofs during the handshake, and a code on every frame after it.

The token is never sent. Each side draws a nonce for the connection, and proves with an HMAC over both nonces and its
message that it has the token, so recordings of earlier connections prove nothing. Two keys are derived from token and
nonces, one per direction. Every later frame carries a code over its number and content: frames cannot be added,
changed, repeated or left out unnoticed. Frames are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
from typing import NamedTuple

CODE_SIZE = 16
_TCP_THIN_LINEAR_TIMEOUTS = 16  # Linux; the socket module does not name it
MEMBER, LEADER = b"phalanx member", b"phalanx leader"


class ForgedFrameError(Exception):
    """A frame with a wrong code."""


class Nonces(NamedTuple):
    """The nonces of both sides."""

    leader: bytes
    member: bytes


def nonce() -> bytes:
    """Return a new nonce."""
    return secrets.token_bytes(32)


def prove(key: bytes, who: bytes, nonces: Nonces, words: bytes) -> bytes:
    """Return the proof that `who` has the key and has sent `words`."""
    # All parts before the words have a fixed length, so different inputs never concatenate to the same bytes.
    return hmac.digest(key, who + nonces.leader + nonces.member + words, "sha256")


def proven(proof: bytes, key: bytes, who: bytes, nonces: Nonces, words: bytes) -> bool:
    """Return whether a proof is right."""
    return hmac.compare_digest(proof, prove(key, who, nonces, words))


def tune(sock: socket.socket | None) -> None:
    """Retransmit every second or so after a cut: with exponential backoff TCP may sleep through its end."""
    if sock is not None:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


class Channel:
    """One side of an authenticated connection."""

    def __init__(self, key: bytes, nonces: Nonces, *, leads: bool) -> None:
        down = prove(key, b"phalanx onward", nonces, b"")
        up = prove(key, b"phalanx upward", nonces, b"")
        self._send_key, self._receive_key = (down, up) if leads else (up, down)
        self._sent = self._received = 0

    def seal(self, content: bytes) -> bytes:
        """Return content as a frame."""
        self._sent += 1
        return _code(self._send_key, self._sent, content) + content

    def open(self, frame: bytes) -> bytes:
        """Return the content of a frame. Raises ForgedFrameError."""
        self._received += 1
        content = frame[CODE_SIZE:]
        if not hmac.compare_digest(frame[:CODE_SIZE], _code(self._receive_key, self._received, content)):
            raise ForgedFrameError
        return content


def _code(key: bytes, number: int, content: bytes) -> bytes:
    code = hashlib.blake2b(number.to_bytes(8, "big"), key=key, digest_size=CODE_SIZE)
    code.update(content)
    return code.digest()
