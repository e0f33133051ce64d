"""Proofs at the door, and a code on every frame behind it: nothing is believed because of where it came from.

The token never crosses the wire. Each side draws a nonce for this one connection, and proves with an HMAC over both
nonces and its words that it has the token: a recording of an earlier conversation proves nothing. Two keys are
derived from token and nonces, one for each direction; every later frame carries a code over its number and content, so
that nobody on the way can add, change, repeat or leave out a frame unnoticed. Frames are not secret.
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
    """A frame whose code is not right."""


class Nonces(NamedTuple):
    leader: bytes
    member: bytes


def nonce() -> bytes:
    return secrets.token_bytes(32)


def prove(key: bytes, who: bytes, nonces: Nonces, words: bytes) -> bytes:
    # Every part before the words has a fixed length, so no two different inputs look the same.
    return hmac.digest(key, who + nonces.leader + nonces.member + words, "sha256")


def proven(proof: bytes, key: bytes, who: bytes, nonces: Nonces, words: bytes) -> bool:
    return hmac.compare_digest(proof, prove(key, who, nonces, words))


def tune(sock: socket.socket | None) -> None:
    """After a cut, try again every second or so: by doubling the pauses TCP may sleep through the end of it."""
    if sock is not None:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


class Channel:
    """One side of a conversation between two that have proved themselves."""

    def __init__(self, key: bytes, nonces: Nonces, *, leads: bool) -> None:
        down = prove(key, b"phalanx onward", nonces, b"")
        up = prove(key, b"phalanx upward", nonces, b"")
        self._send_key, self._receive_key = (down, up) if leads else (up, down)
        self._sent = self._received = 0

    def seal(self, content: bytes) -> bytes:
        self._sent += 1
        return _code(self._send_key, self._sent, content) + content

    def open(self, frame: bytes) -> bytes:
        self._received += 1
        content = frame[CODE_SIZE:]
        if not hmac.compare_digest(frame[:CODE_SIZE], _code(self._receive_key, self._received, content)):
            raise ForgedFrameError
        return content


def _code(key: bytes, number: int, content: bytes) -> bytes:
    code = hashlib.blake2b(number.to_bytes(8, "big"), key=key, digest_size=CODE_SIZE)
    code.update(content)
    return code.digest()
