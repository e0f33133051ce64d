"""The server of the page, for `phalanx watch --page` and `phalanx run --page`."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from aiohttp import web

from phalanx.watch.page import address, keys
from phalanx.watch.page.address import PageAddress
from phalanx.watch.page.keys import PageKeys
from phalanx.watch.page.run_page import RunPage
from phalanx.watch.page.site import Site
from phalanx.watch.source import Source

_LAST = 1.0  # seconds to send the end to browsers


def serve(source: Source, at: str | None = None, fd: int | None = None, key: str | None = None) -> int:
    """Serve the page until Ctrl-C. With `fd`, a listening socket of `phalanx run`: until the run ends."""
    where = address.parse(at)
    key = key or keys.new()
    sock = address.listen(where) if fd is None else socket.socket(fileno=fd)
    with sock:
        return asyncio.run(_served(source, where, key, sock, stays=fd is None))


def announce(where: PageAddress, sock: socket.socket, key: str) -> None:
    """Print the link to a page."""
    sys.stdout.write(address.link(where, sock, key) + "\n")
    if not where.loopback:
        sys.stdout.write(f"{where.warning}\n")
    sys.stdout.flush()


async def _served(source: Source, where: PageAddress, key: str, sock: socket.socket, *, stays: bool) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    page = PageServer(source, where, PageKeys(key, sock.getsockname()[1], source.run))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.ServerRunner(page.gate, handle_signals=False, shutdown_timeout=_LAST)
    await runner.setup()
    following = asyncio.create_task(page.subscribers.follow())
    stopping = asyncio.create_task(stop.wait())
    try:
        await web.SockSite(runner, sock).start()
        if stays:
            announce(where, sock, key)
        await asyncio.wait({stopping, following}, return_when=asyncio.FIRST_COMPLETED)
        if stays:
            if following.done() and following.exception() is not None:
                sys.stderr.write(f"phalanx: no more events: {following.exception()}\n")
            await stopping
    finally:
        following.cancel()
        stopping.cancel()
        await asyncio.gather(following, stopping, return_exceptions=True)
        await runner.cleanup()
    if not stays and following.done() and not following.cancelled() and following.exception() is not None:
        raise following.exception() or AssertionError
    return 0


class PageServer:
    """Answers the requests of browsers and of Prometheus about one run."""

    def __init__(self, source: Source, where: PageAddress, own: PageKeys) -> None:
        page = RunPage(source)
        self.subscribers = page.subscribers
        self.gate = Site(where, own, {"/": "index.html"}, page.routes).gate
