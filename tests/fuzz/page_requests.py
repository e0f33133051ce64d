"""Requests to the page of a run: without the key it shows nothing about the run, and nothing stops the server."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator

from tests.fuzz.campaign import Check
from tests.fuzz.mutation import mutated
from tests.watch.page.fake_source import KEY, begun, served

RUN = "secret-run-4711"
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "CONNECT", "TRACE", "get", "")
PATHS = (
    *("/", "/enter", "/live", "/metrics", "/log", "/search", "/why", "/state", "/app.js"),
    *("/../etc/passwd", "/%2e%2e/", "*", "//", ""),
)
HEADERS = (
    *("Origin: http://evil.example", "Origin: null", "Sec-Fetch-Site: cross-site", "Cookie: phalanx=x; a=b"),
    *("Content-Length: 10", "Content-Length: -1", "Content-Length: 99999999999", "Transfer-Encoding: chunked"),
    *("Cookie: ;;=", "Range: bytes=0-"),
    *("Authorization: Bearer x", f"Authorization: Bearer {KEY[:-1]}", "Authorization: Basic eDp5", "X: " + "y" * 5000),
    *("Upgrade: websocket", "Connection: Upgrade", "Expect: 100-continue", "Accept-Encoding: gzip", "If-None-Match: *"),
)
_FIRST, _NEXT = 0.25, 0.02  # seconds to wait for an answer, and for more of it
BODIES = ("", KEY[:-1], "key=x", "{}", "\0" * 100, "5\r\nhello\r\n0\r\n\r\n")


@contextlib.contextmanager
def opened() -> Iterator[Check]:
    """Serve the page of an invented run, and yield the check of one request."""
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        serving = served(runner.run(begun(2, run=RUN)))
        where = runner.run(serving.__aenter__())
        port = int(where.rsplit(":", 1)[1].strip("/"))
        stack.callback(lambda: runner.run(serving.__aexit__(None, None, None)))
        yield lambda chance, note: runner.run(check(port, chance, note))
        request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
        good = runner.run(_asked(port, request.encode()))
        assert good.startswith(b"HTTP/1.1 200 "), "the server does not answer any more"


async def check(port: int, chance: random.Random, note: Callable[[object], None]) -> None:
    """Send a request without a valid key."""
    host = chance.choice([f"127.0.0.1:{port}"] * 4 + ["localhost", "evil.example", "", "127.0.0.1:1"])
    query = chance.choice(["", "", "?rank=0", "?rank=-1&start=x", "?text=" + "%00" * 20, "#" + KEY[:-1]])
    path = chance.choice(PATHS) + query
    lines = [f"{chance.choice(METHODS)} {path} HTTP/1.{chance.choice('0119')}", f"Host: {host}"]
    lines += chance.sample(HEADERS, chance.randrange(4))
    request = ("\r\n".join(lines) + "\r\n\r\n" + chance.choice(BODIES)).encode("latin-1")
    if chance.random() < 0.4:
        request = mutated(request, chance)
    note(request)
    answer = await _asked(port, request)
    status = answer[9:12] if answer.startswith(b"HTTP/1.") else b""
    assert status[:1] != b"5", answer[:200]
    for secret in (RUN.encode(), KEY.encode()):
        assert secret not in answer or secret in request, answer[:2000]  # an error may quote the request


async def _asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            writer.write(request)
            data = await asyncio.wait_for(reader.read(1 << 16), _FIRST)  # half a request is not answered
            while data:
                answer += data
                data = await asyncio.wait_for(reader.read(1 << 16), _NEXT)  # a live stream does not end
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer
