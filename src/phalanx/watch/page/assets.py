"""The files of the page: as the server hands them out, and as one file, for a report.

The scripts are modules that a browser loads as they are. In one file they stand behind each other, in the order of
`SCRIPTS` (what is imported comes first), without their imports and exports: so no two of them may use the same name
at the top.
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
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


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
    script = "\n".join(_IMPORT.sub("", _text(name)) for name in SCRIPTS)
    script = f'<script>\n"use strict";\n(() => {{\n{_EXPORT.sub("", script)}}})();\n</script>'
    data = run.replace("<", "\\u003c")  # nothing in it ends the element that it is in
    page = _between(_text(INDEX), "links", f"<style>\n{_text('style.css')}</style>")
    return _between(
        page, "data", f'<script type="application/json" id="run">{data}</script>\n{script}' if run else script
    )


def _text(name: str) -> str:
    return read(name).decode()


def _between(page: str, name: str, text: str) -> str:
    """What stands between <!-- begin: name … --> and <!-- end: name --> becomes that text."""
    begin = page.index(f"<!-- begin: {name}")
    end = f"<!-- end: {name} -->"
    return page[:begin] + text + page[page.index(end) + len(end) :]
