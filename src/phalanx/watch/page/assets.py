"""The files of the page, as the server sends them and as one file for a report.

The scripts are modules that a browser loads unchanged: common/ formats and draws, views/ has one per part of the page.
In one file each becomes a function that returns its exports, in the order of `SCRIPTS`: imported modules come first.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

INDEX = "index.html"
RUNS = ("views/compare.js", "runs.js")  # of `phalanx ui`, not in a report
SCRIPTS = (
    "common/dom.js",
    "common/format.js",
    "phases.js",
    "common/theme.js",
    "common/canvas.js",
    "model.js",
    "live.js",
    "views/about.js",
    "views/head.js",
    "views/grid.js",
    "views/timeline.js",
    "common/plot.js",
    "common/save.js",
    "views/charts.js",
    "views/topology.js",
    "views/events.js",
    "views/stacks.js",
    "views/logs.js",
    "views/keys.js",
    "main.js",
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\.{1,2}/(?:\w+/)?(\w+)\.js\";$", re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|function|class) ([\w$]+))", re.MULTILINE)


def names() -> tuple[str, ...]:
    """Return the names that are served as /assets/NAME."""
    return ("style.css", "icon.svg", "runs.html", *SCRIPTS, *RUNS)


@functools.cache
def read(name: str) -> bytes:
    """Return the content of one of `names()`, or of INDEX."""
    return resources.files(__package__).joinpath("assets", name).read_bytes()


def kind(name: str) -> str:
    """Return the content type."""
    return KINDS[name.rpartition(".")[2]]


def inlined(run: str = "") -> str:
    """Return the page as one file.

    `run`: the JSON that it shows, {"whole": PageUpdate, "logs": {rank: {stdout, stderr}}, "why": WhyAnswer}.
    """
    script = "\n".join(map(_scoped, SCRIPTS))
    script = f'<script>\n"use strict";\n(() => {{\n{script}\n}})();\n</script>'
    data = run.replace("<", "\\u003c")  # the data cannot close its element
    page = _between(_text(INDEX), "links", f"<style>\n{_text('style.css')}</style>")
    return _between(
        page, "data", f'<script type="application/json" id="run">{data}</script>\n{script}' if run else script
    )


def _scoped(name: str) -> str:
    """Return a module as a function with its own scope."""
    text = _IMPORT.sub(r"const \1 = module_\2;", _text(name))
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1", text)
    module = name.rpartition("/")[2].removesuffix(".js")
    return f"const module_{module} = (() => {{\n{body}return {{ {exported} }};\n}})();"


def _text(name: str) -> str:
    return read(name).decode()


def _between(page: str, name: str, text: str) -> str:
    """Replace what is between <!-- begin: name … --> and <!-- end: name -->."""
    begin = page.index(f"<!-- begin: {name}")
    end = f"<!-- end: {name} -->"
    return page[:begin] + text + page[page.index(end) + len(end) :]
