"""A site on the port of a page: who may ask, the shells and their assets, and the routes behind the key.

GET /            a shell, which contains nothing of a run, and /assets/…
POST /enter      exchanges the key for a cookie and the folder below which it is valid
everything else  needs the cookie
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from phalanx.connection_gate import ConnectionGate
from phalanx.contract import encoding
from phalanx.errors import PhalanxError, UsageError
from phalanx.watch.page import address, guard
from phalanx.watch.page.address import PageAddress
from phalanx.watch.page.keys import PageKeys

_ASSETS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
_LONGEST_KEY = 1024  # characters
_TOKEN = "X-Phalanx-Token"  # noqa: S105  # the header of requests that change something
logger = logging.getLogger(__name__)

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Routes = Mapping[tuple[str, str], Answer]  # method and path


class QuestionError(UsageError):
    """A request that cannot be understood."""


class Site:
    """Answers requests. `shells`: path -> the HTML file in the assets."""

    def __init__(self, where: PageAddress, own: PageKeys, shells: Mapping[str, str], routes: Routes) -> None:
        self.gate = ConnectionGate(self._handle, guard.LIMITS)
        self._keys = own
        self._names = address.names(where)
        self._digits = where.everywhere
        self._shells = shells
        self._routes = routes
        self._assets = _assets()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        why = guard.foreign(request, self._names, digits=self._digits)
        if why:
            return guard.refused(403, why)
        path, method = self._keys.within(request.path), request.method
        if path == "/enter":
            return await self._enter(request)
        if path in self._shells or path.startswith("/assets/"):
            return self._shell(request, self._shells.get(path) or path.removeprefix("/assets/"))
        answer = self._routes.get((method, path))
        if not guard.entitled(request, self._keys, bearer=path == "/metrics"):
            return guard.refused(401, "the key is missing: open the link that phalanx printed")
        if method != "GET" and not self._keys.allows(request.headers.get(_TOKEN)):
            return guard.refused(403, f"the header {_TOKEN} is missing")
        self.gate.trust(request)
        if answer is None:
            return guard.refused(404, "not found")
        try:
            return guard.sealed(await answer(request))
        except QuestionError as error:
            return guard.refused(400, str(error))
        except PhalanxError as error:
            return guard.refused(503, str(error))
        except ConnectionError:
            raise  # the browser is gone
        except Exception:  # a bug here must not end the server
            logger.exception("%s %s failed", method, path)
            return guard.refused(500, "internal error: see the output of the server")

    async def _enter(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "POST":
            return guard.refused(405, "POST the key")
        length = request.content_length
        if length is None or length > _LONGEST_KEY:
            return guard.refused(413, "not a key")
        if not self._keys.opens((await request.read()).decode(errors="replace").strip()):
            return guard.refused(403, "not the key of this run")
        self.gate.trust(request)
        folder = self._keys.folder
        response = web.Response(status=204, headers={"Content-Location": f"{folder}/"})
        response.set_cookie(
            self._keys.cookie_name, self._keys.cookie, path=f"/{folder}/", httponly=True, samesite="Strict"
        )
        return guard.sealed(response)

    def _shell(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        """Return a static file. Names are looked up in a table, never as paths."""
        if request.method not in ("GET", "HEAD"):
            return guard.refused(405, "GET it")
        if name not in self._assets:
            return guard.refused(404, "not found")
        content, kind, tag = self._assets[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return guard.sealed(web.Response(status=304, headers=headers))
        charset = "utf-8" if not kind.startswith("image/p") else None
        return guard.sealed(web.Response(body=content, content_type=kind, charset=charset, headers=headers))


def number(text: str | None) -> int:
    """Return a whole number of a query. Raises QuestionError."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise QuestionError(f"a whole number was expected, not {(text or 'nothing')[:40]!r}")
    return int(text)


def json(content: Any) -> web.StreamResponse:
    """Return `content` as JSON."""
    return web.Response(body=encoding.encode(content), content_type="application/json", charset="utf-8")


def _assets() -> dict[str, tuple[bytes, str, str]]:
    """Return name -> content, type, ETag. A name may have a folder: views/grid.js."""
    found = {}
    with contextlib.suppress(OSError):
        for folder, _, names in os.walk(_ASSETS):
            for name in names:
                path = os.path.join(folder, name)
                kind = _TYPES.get(os.path.splitext(name)[1])
                if kind is not None:
                    with open(path, "rb") as file:
                        content = file.read()
                    tag = hashlib.sha256(content).hexdigest()[:16]
                    found[os.path.relpath(path, _ASSETS)] = (content, kind, f'"{tag}"')
    return found
