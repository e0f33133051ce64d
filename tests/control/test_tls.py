"""Encrypted connections between nodes: who can connect, and what an attacker on the network can read or change."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ssl
import sys
from typing import Any

import pytest

from phalanx.control import messages, tls
from phalanx.control.leader.server import PATH
from phalanx.control.messages import JoinRequest, NoteMessage, Refusal
from phalanx.control.tokens import Token
from phalanx.errors import JoinError
from tests.control.parties import OTHER, TOKEN, joined, leading, raw_client, until
from tests.control.recording_proxy import RecordingProxy

OPEN = Token(b"", "nowhere (--no-auth)")
SECRET = "the loss is 0.25"


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Do both sides of a handshake. Return the client's side."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0]


def test_a_holder_of_the_token_is_admitted() -> None:
    for token in (TOKEN, OPEN):
        side = shake(tls.server_context(token), tls.client_context(token))
        assert side.version() == "TLSv1.3"
        assert not side.session_reused


@pytest.mark.parametrize(("server", "client"), [(TOKEN, OTHER), (OTHER, TOKEN), (OPEN, TOKEN), (TOKEN, OPEN)])
def test_a_holder_of_another_token_is_not(server: Token, client: Token) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(tls.server_context(server), tls.client_context(client))
    trusting = tls.client_context(client)
    trusting.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLCertVerificationError):  # the server refuses the client
        shake(tls.server_context(server), trusting)


def test_a_client_without_a_certificate_is_not_admitted() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake(tls.server_context(TOKEN), context)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake(tls.server_context(TOKEN), context)


def test_a_certificate_of_a_member_does_not_serve_a_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tls._certificates
    monkeypatch.setattr(tls, "_certificates", lambda secret, *, serves: real(secret, serves=False))
    posing = tls.server_context(TOKEN)
    monkeypatch.undo()
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake(posing, tls.client_context(TOKEN))


def test_without_cryptography_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(f"No module named '{name}'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(JoinError) as failed:
        tls.client_context(TOKEN)
    assert "cryptography" in failed.value.what
    assert failed.value.fix == "pip install cryptography, on every node"


def test_a_run_on_one_node_does_not_import_it() -> None:
    code = "import sys, phalanx.cli.commands.run.run, phalanx.launcher.api, phalanx.launcher.node_run; "
    code += "sys.exit('cryptography' in sys.modules)"

    async def run() -> int:
        return await (await asyncio.create_subprocess_exec(sys.executable, "-c", code)).wait()

    assert asyncio.run(run()) == 0


def test_a_proxy_can_neither_read_nor_replay_a_connection() -> None:
    async def meet() -> None:
        proxy = RecordingProxy()
        async with leading(3) as led, proxy.between(led.port):
            async with joined(proxy.port, 1) as (one, events):
                one.send(NoteMessage(text=SECRET))
                await until(lambda: led.events.from_members)
                led.members.broadcast(NoteMessage(text=SECRET))
                await until(lambda: events.from_leader)
            everything = b"".join(proxy.seen) + bytes(proxy.downstream)
            assert len(everything) > 1000
            for word in (SECRET.encode(), b"host1", PATH.encode(), TOKEN.key):
                assert word not in everything
            count = len(led.events.from_members)
            reader, writer = await asyncio.open_connection("127.0.0.1", led.port)
            writer.write(proxy.seen[0])  # replay everything that the member has sent
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(60):
                    while await reader.read(65536):
                        pass
            writer.close()
            assert len(led.events.from_members) == count
            assert not led.ids

    asyncio.run(meet())


def test_a_member_of_another_protocol_is_refused_in_words() -> None:
    async def meet() -> None:
        async with leading() as led, raw_client(led.port) as client:
            await client.ws.send_bytes(messages.encode(JoinRequest(protocol=77, info=b"of another version")))
            answer = await client.answered()
            assert answer == Refusal(kind="version", leader=f"protocol {messages.PROTOCOL}", member="protocol 77")
            text = f"127.0.0.1 was rejected: it has protocol 77, node 0 has protocol {messages.PROTOCOL}"
            assert led.events.notes == [text]

    asyncio.run(meet())
