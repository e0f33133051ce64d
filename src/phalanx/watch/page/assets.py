"""The files of the page: as the server hands them out, and as one file, for a report.

The scripts are modules that a browser loads as they are. In one file each is a function that gives what it exports,
in the order of `SCRIPTS`: what is imported comes first.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

INDEX = "index.html"
SCRIPTS = (
    "dom.js",
    "words.js",
    "phases.js",
    "theme.js",
    "canvas.js",
    "model.js",
    "live.js",
    "head.js",
    "grid.js",
    "timeline.js",
    "charts.js",
    "topology.js",
    "story.js",
    "stacks.js",
    "logs.js",
    "keys.js",
    "main.js",
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";$", re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|function|class) ([\w$]+))", re.MULTILINE)


def names() -> tuple[str, ...]:
    """What /assets/NAME may ask for."""
    return ("style.css", "icon.svg", *SCRIPTS)


@functools.cache
def read(name: str) -> bytes:
    """One of `names()`, or INDEX."""
    return resources.files(__package__).joinpath("assets", name).read_bytes()


def kind(name: str) -> str:
    """Its content type."""
    return KINDS[name.rpartition(".")[2]]


def inlined(run: str = "") -> str:
    """The page in one file. `run`: the JSON that it shows, {"whole": Update, "logs": {rank: {stdout, stderr}},
    "why": Because}; without it, it shows nothing."""
    script = "\n".join(map(_scoped, SCRIPTS))
    script = f'<script>\n"use strict";\n(() => {{\n{script}\n}})();\n</script>'
    data = run.replace("<", "\\u003c")  # nothing in it ends the element that it is in
    page = _between(_text(INDEX), "links", f"<style>\n{_text('style.css')}</style>")
    return _between(
        page, "data", f'<script type="application/json" id="run">{data}</script>\n{script}' if run else script
    )


def _scoped(name: str) -> str:
    """A module as a function, so that its names stay its own."""
    text = _IMPORT.sub(r"const \1 = module_\2;", _text(name))
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1", text)
    return f"const module_{name.removesuffix('.js')} = (() => {{\n{body}return {{ {exported} }};\n}})();"


def _text(name: str) -> str:
    return read(name).decode()


def _between(page: str, name: str, text: str) -> str:
    """What stands between <!-- begin: name … --> and <!-- end: name --> becomes that text."""
    begin = page.index(f"<!-- begin: {name}")
    end = f"<!-- end: {name} -->"
    return page[:begin] + text + page[page.index(end) + len(end) :]
