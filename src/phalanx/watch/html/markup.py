"""HTML from untrusted text: everything that is not `Html` is escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape

_NEVER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset(("meta", "br", "hr"))


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


def clean(text: str) -> str:
    """Replace characters that HTML does not allow or that change the reading direction."""
    return _NEVER.sub("�", text)


def safe(child: str) -> str:
    """Return `child` as markup, escaped unless it is `Html`."""
    return child if isinstance(child, Html) else escape(clean(child))


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Return an element: `tag("p", "a < b", class_="note")`."""
    attrs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(value))}"' for key, value in attributes.items()
    )
    inside = "".join(map(safe, children))
    return Html(f"<{name}{attrs}>" if name in _VOID else f"<{name}{attrs}>{inside}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Return the parts one after the other."""
    return Html("".join(map(safe, parts)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """Return a table. `numbers`: columns that are aligned to the right."""

    def cells(kind: str, row: Sequence[str]) -> Html:
        row_cells = []
        for column, cell in enumerate(row):
            right = {"class_": "number"} if column in numbers else {}
            scope = {"scope": "col"} if kind == "th" else {}
            row_cells.append(tag(kind, cell, **right, **scope))
        return tag("tr", *row_cells)

    body = tag("tbody", *(cells("td", row) for row in rows))
    # scroll a wide table, not the page
    return tag("div", tag("table", tag("thead", cells("th", head)), body), class_="wide", tabindex="0")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a definition list. Empty values are left out."""
    return tag("dl", *(joined([tag("dt", name), tag("dd", value)]) for name, value in pairs if value))


def folded(title: str, *children: str, is_open: bool = False) -> Html:
    """Return a section that can be opened without a script."""
    inside = joined([tag("summary", title), *children])
    return Html(f"<details{' open' if is_open else ''}>{inside}</details>")


def pre(text: str) -> Html:
    """Return preformatted text."""
    # HTML drops a newline at the start of <pre>.
    return tag("pre", tag("code", Html("\n" + safe(text)) if text.startswith("\n") else text), tabindex="0")


def content_policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return a policy that allows only these styles and scripts, and no network. It applies to frames as well."""

    def digests(texts: Iterable[str]) -> str:
        encoded = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in encoded)

    allowed = digests(scripts) or "'none'"
    rules = f"default-src 'none'; style-src {digests(styles)}; script-src {allowed}"
    return f"<meta http-equiv=\"Content-Security-Policy\" content=\"{rules}; base-uri 'none'; form-action 'none'\">"
