"""Who gets in, and how much a stranger may hold: nobody is told anything of the run before it is known that he may be.

Against pages of other sites in the same browser: the name they call us by (`Host`), where they come from (`Origin`,
`Sec-Fetch-Site`), and a cookie that is not sent along for them. Against whoever else reaches the port: the key.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from phalanx.control.connection_gate import GateLimits
from phalanx.watch.page.keys import PageKeys

# A browser has six connections, and the page itself may come by a slow line. Its headers are long: it sends the cookies
# of everything that ever was on this host, on any port.
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
    """With what every answer carries."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def refused(status: int, why: str) -> web.StreamResponse:
    return sealed(web.Response(status=status, text=why + "\n"))


def foreign(request: web.BaseRequest, names: frozenset[str], *, digits: bool) -> str:
    """Why this is none of our own pages; empty: it may be one. `digits`: any address in digits is our name as well."""
    host = request.headers.get("Host", "")
    if not _ours(host, names, digits=digits):
        return "this is not a name of this page"
    origin = request.headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return "a page of another origin asks"
    site = request.headers.get("Sec-Fetch-Site", "none")
    # A link to it may stand anywhere: what it leads to is the shell, which holds nothing.
    follows = request.method == "GET" and request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    if site not in ("same-origin", "none") and not follows:
        return "a page of another site asks"
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
    if keys.knows(request.cookies.get(keys.cookie_name)):
        return True
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return bearer and scheme.lower() == "bearer" and keys.opens(key.strip())
