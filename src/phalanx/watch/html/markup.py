"""Pieces of HTML from text that nobody trusts: whatever is not Html already is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_NEVER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset(("meta", "br", "hr"))


class Html(str):
    """Text that is markup, made here."""

    __slots__ = ()


def clean(text: str) -> str:
    """Without what HTML does not know, or what makes it read other than it is: control characters, half letters, and
    those that turn the direction of writing."""
    return _NEVER.sub("�", text)


def safe(child: str) -> str:
    return child if isinstance(child, Html) else escape(clean(child))


def tag(name: str, *children: str, **attributes: str) -> Html:
    """`tag("p", "a < b", class_="told")`"""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(value))}"' for key, value in attributes.items()
    )
    inside = "".join(map(safe, children))
    return Html(f"<{name}{said}>" if name in _VOID else f"<{name}{said}>{inside}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(map(safe, parts)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """`numbers`: columns that are written from the right."""

    def cells(kind: str, row: Sequence[str]) -> Html:
        told = []
        for column, cell in enumerate(row):
            right = {"class_": "number"} if column in numbers else {}
            scope = {"scope": "col"} if kind == "th" else {}
            told.append(tag(kind, cell, **right, **scope))
        return tag("tr", *told)

    body = tag("tbody", *(cells("td", row) for row in rows))
    # a wide table is scrolled by itself, and not the page
    return tag("div", tag("table", tag("thead", cells("th", head)), body), class_="wide", tabindex="0")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they are; what is empty is left out."""
    return tag("dl", *(joined([tag("dt", name), tag("dd", value)]) for name, value in pairs if value))


def folded(title: str, *children: str, is_open: bool = False) -> Html:
    """To be unfolded, without a script."""
    inside = joined([tag("summary", title), *children])
    return Html(f"<details{' open' if is_open else ''}>{inside}</details>")


def pre(text: str) -> Html:
    # A first line that is empty would be swallowed.
    return tag("pre", tag("code", Html("\n" + safe(text)) if text.startswith("\n") else text), tabindex="0")
