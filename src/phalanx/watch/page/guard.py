"""Access control of the page.

`Host`, `Origin` and `Sec-Fetch-Site`, and a cookie that is not sent with their requests, protect against pages of other
sites in the same browser. The key protects against others who can reach the port.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from phalanx.connection_gate import GateLimits
from phalanx.watch.page.keys import PageKeys

# A browser opens six connections and may be slow. Its headers are long: it sends the cookies of all servers that ever
# ran on this host, on any port.
LIMITS = GateLimits(most=128, patience=30.0, allowance=1 << 16, field=1 << 13)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Server": "phalanx",
}


def sealed(response: web.StreamResponse) -> web.StreamResponse:
    """Return `response` with the security headers of every answer."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def refused(status: int, why: str) -> web.StreamResponse:
    """Return an error response."""
    return sealed(web.Response(status=status, text=why + "\n"))


def foreign(request: web.BaseRequest, names: frozenset[str], *, digits: bool) -> str:
    """Return why a request does not come from our own page; empty: it is allowed.

    `digits`: accept any IP address as a name of this host.
    """
    host = request.headers.get("Host", "")
    if not _ours(host, names, digits=digits):
        return "the Host header is not a name of this page"
    origin = request.headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return "the request comes from another origin"
    site = request.headers.get("Sec-Fetch-Site", "none")
    # A link on any site may open the page itself: the shell contains no data of the run.
    follows = request.method == "GET" and request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    if site not in ("same-origin", "none") and not follows:
        return "the request comes from another site"
    return ""


def _ours(host: str, names: frozenset[str], *, digits: bool) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        name, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return False
    if parts.netloc != host or "@" in host:
        return False
    if name in names:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return digits or address.is_loopback


def entitled(request: web.BaseRequest, keys: PageKeys, *, bearer: bool = False) -> bool:
    """Return whether the request has the cookie, or, with `bearer`, the key."""
    if keys.knows(request.cookies.get(keys.cookie_name)):
        return True
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return bearer and scheme.lower() == "bearer" and keys.opens(key.strip())
