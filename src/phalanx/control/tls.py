"""Encryption of the connections between nodes: TLS 1.3, with certificates that only a holder of the token can create.

The key of a certificate authority is derived from the token and is the same on every node. Each process signs a
certificate for its own key with it, and trusts no other authority. So each side of a connection proves to the other
that it has the token, which is never sent, and every connection has fresh keys. Without a token (--no-auth) anyone can
derive the authority: connections are encrypted, but anyone may take part.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
from typing import TYPE_CHECKING

from phalanx.control.tokens import Token
from phalanx.errors import JoinError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HANDSHAKE = 0x16  # the first byte of a TLS connection
_TCP_THIN_LINEAR_TIMEOUTS = 16  # Linux; the socket module does not name it
# Clocks of nodes may be wrong, and a certificate is used only during its process: make it always valid.
_ALWAYS = (datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31))


def server_context(token: Token) -> ssl.SSLContext:
    """Return the TLS settings of a leader. Raises JoinError if the package cryptography is missing."""
    context = _context(token, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # every connection must prove the token
    return context


def client_context(token: Token) -> ssl.SSLContext:
    """Return the TLS settings of a member. Raises JoinError if the package cryptography is missing."""
    return _context(token, ssl.PROTOCOL_TLS_CLIENT)


def tune(sock: socket.socket | None) -> None:
    """Retransmit about once per second during an interruption: with exponential backoff, TCP would resume late."""
    if sock is not None:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


def _context(token: Token, protocol: int) -> ssl.SSLContext:
    try:
        authority, chain = _certificates(token.key, serves=protocol == ssl.PROTOCOL_TLS_SERVER)
    except ImportError as error:
        raise JoinError(
            "a run on several nodes needs the Python package cryptography, which encrypts their connections",
            details=[f"importing it failed: {error}"],
            fix="pip install cryptography, on every node",
        ) from error
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the token identifies a node, not its name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    # The ssl module reads a key from a file only: this file is in memory, and no other process can open it.
    fd = os.memfd_create("phalanx-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, chain)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _certificates(secret: bytes, *, serves: bool) -> tuple[str, bytes]:
    """Return the certificate of the authority, and a new one that it has signed, with its key. All are PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seed = HKDF(hashes.SHA256(), 32, salt=None, info=b"phalanx authority of a run").derive(secret)
    authority_key, own_key = Ed25519PrivateKey.from_private_bytes(seed), Ed25519PrivateKey.generate()
    authority = _sign(
        "phalanx",
        authority_key,
        authority_key,
        x509.BasicConstraints(ca=True, path_length=0),
    )
    # A member's certificate is not valid for a leader, and vice versa: no one can be answered with its own certificate.
    purpose = x509.OID_SERVER_AUTH if serves else x509.OID_CLIENT_AUTH
    own = _sign("phalanx node", own_key, authority_key, x509.ExtendedKeyUsage([purpose]))
    pem = serialization.Encoding.PEM
    key = own_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return authority.public_bytes(pem).decode(), own.public_bytes(pem) + key


def _sign(
    name: str, key: Ed25519PrivateKey, authority: Ed25519PrivateKey, extension: x509.ExtensionType
) -> x509.Certificate:
    from cryptography import x509

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    begin, end = _ALWAYS
    builder = x509.CertificateBuilder(named("phalanx"), named(name), key.public_key(), x509.random_serial_number())
    return (
        builder.not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(extension, critical=True)
        .sign(authority, None)
    )
