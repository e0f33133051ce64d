"""Writes the pages of docs/reference that are generated from the code: `python -m tools.reference`.

`make docs` runs it, and a test fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from phalanx.cli.main import GROUPS, command
from phalanx.cli.options.option import Option
from phalanx.cli.options.table import OPTIONS, SECTIONS
from phalanx.cli.options.text import typed
from phalanx.contract import events
from phalanx.watch import prometheus
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
GENERATED = "<!-- Written by `python -m tools.reference`. -->"

OPTIONS_TEXT = """\
`phalanx run [options] script [arguments]`. `phalanx plan` and `phalanx chaos` accept the same options.

phalanx accepts every torchrun option, with the same meaning except for those of the last table. Put options before
the script; everything after it is passed to the script. Underscores may replace dashes (`--log_dir`), and unique
prefixes are accepted (`--log-d`). A variable sets the default of an option; for a flag it is 1 or 0."""

EVENTS_TEXT = """\
A run writes one JSON object per line: `sample` and `metrics` to `samples.jsonl`, all others to `events.jsonl`. The
field `event` has the type and `time` the seconds since 1970. Fields with their default value are left out. Terminal
view, dashboard, report and `/metrics` use only these events. New fields and events may be added."""

PARTS_TEXT = """\
Objects inside of events. Those marked *as a list* are written as lists of their fields, in this order. `RunMetadata`
is the content of [metadata.json](run-folder.md#metadata)."""

METRICS_TEXT = """\
The page of a run serves these at `/metrics`, in the text format of Prometheus.
[Viewers](viewers.md#prometheus-and-grafana) describes how to scrape them;
[examples/grafana.json](https://github.com/phalanx-train/phalanx/blob/main/examples/grafana.json) is a dashboard. A
metric that is not known for a run is left out. `phalanx_measured` has one time series per metric of your training,
with its name in the label `name`."""

# Verbs with the options of `phalanx run`.
AS_RUN = {
    "run": "[options](options.md)",
    "plan": "[options of run](options.md)",
    "chaos": "[options of run](options.md)",
}


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    for row in (titles, ("---" for _ in titles), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def options() -> str:
    """Return the options of `phalanx run`, `plan` and `chaos`."""
    lines = [
        "# Options of `phalanx run`",
        "",
        GENERATED,
        "",
        OPTIONS_TEXT,
    ]
    for section in SECTIONS:
        rows = (_option(option) for option in OPTIONS if option.section == section)
        lines += ["", f"## {section}", "", *_table(("option", "default", "variable", "from", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _option(option: Option) -> tuple[str, ...]:
    meaning = option.help + (f" Here {option.no_effect}." if option.no_effect else "")
    return (f"`{typed(option)}`", _code(option.default), _code(option.variable), option.origin, meaning)


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def commands() -> str:
    """Return all verbs, with their options."""
    lines = ["# Commands", "", GENERATED, "", "`phalanx VERB --help` prints the same."]
    for group, verbs in GROUPS.items():
        lines += ["", f"## {group}"]
        for verb, description in verbs.items():
            lines += ["", f"### phalanx {verb}", "", *_verb(verb, description)]
    return "\n".join(lines) + "\n"


def _verb(verb: str, description: str) -> Iterator[str]:
    if verb in AS_RUN:
        yield from (
            f"`phalanx {verb} [options] script [arguments]`",
            "",
            f"{_sentence(description)} It takes the {AS_RUN[verb]}.",
        )
        return
    if verb == "bench":
        yield from (
            "`phalanx bench NAME [options]`",
            "",
            f"{_sentence(description)} It needs a checkout: see [Benchmarks](../benchmarks.md).",
        )
        return
    parser: argparse.ArgumentParser = command(verb).make_parser()
    actions = [
        action
        for action in parser._actions
        if action.help not in (argparse.SUPPRESS, "show this help message and exit")
    ]
    words = [
        f"[{_positional(action)}]" if action.nargs in ("?", "*") else _positional(action)
        for action in actions
        if not action.option_strings
    ]
    yield f"`{' '.join([parser.prog, *(['[options]'] if len(actions) > len(words) else []), *words])}`"
    yield from ("", " ".join((parser.description or "").split()), "")
    yield from _table(("argument", "meaning"), ((f"`{_argument(action)}`", action.help or "") for action in actions))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith("?") else ".")


def _argument(action: argparse.Action) -> str:
    if not action.option_strings:
        return _positional(action)
    value = (
        ""
        if action.nargs == 0
        else action.metavar or ("|".join(action.choices) if action.choices else action.dest.upper())
    )
    optional = action.nargs in ("?", "*")
    return ", ".join(action.option_strings) + (f" [{value}]" if optional else f" {value}" if value else "")


def _positional(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def event_types() -> str:
    """Return all events, with their fields."""
    source = inspect.getsource(events)
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines = [
        "# Events",
        "",
        GENERATED,
        "",
        EVENTS_TEXT,
    ]
    for name, node in classes.items():
        kind = getattr(events, name)
        if kind in events.AnyEvent.__args__:
            lines += ["", f"## {kind.__struct_config__.tag}", "", *_event(node, source)]
    lines += [
        "",
        "## Parts of events",
        "",
        PARTS_TEXT,
    ]
    for name, node in classes.items():
        kind = getattr(events, name)
        if name != "Event" and kind not in events.AnyEvent.__args__:
            listed = " As a list." if kind.__struct_config__.array_like else ""
            lines += ["", f"### {name}", "", *_event(node, source, listed)]
    letters = ", ".join(f"`{letter}` {phase}" for phase, letter in events.LETTERS.items())
    lines += ["", "### Letters of phases", "", f"{letters}, `{events.UNSEEN}` not sampled."]
    return "\n".join(lines) + "\n"


def _event(node: ast.ClassDef, source: str, more: str = "") -> Iterator[str]:
    yield (ast.get_docstring(node) or "") + more
    texts = source.splitlines()
    rows = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            comment = texts[(field.end_lineno or 0) - 1].partition("  # ")[2]
            default = f"`{ast.unparse(field.value)}`" if field.value is not None else ""
            rows.append((f"`{field.target.id}`", f"`{ast.unparse(field.annotation)}`", default, comment))
    if rows:
        yield from ("", *_table(("field", "type", "default", "meaning"), rows))


def metrics() -> str:
    """Return all metrics for Prometheus, from a simulated run."""
    model, ranks = RunModel(), 4
    for event in simulation.begin(ranks, now=1.7e9):
        model.apply(event)
    for second in range(90):
        for event in simulation.second(second, ranks, now=1.7e9 + 2 + second):
            model.apply(event)
    text = prometheus.text(model)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    rows = []
    for name, meaning in re.findall(r"^# HELP (\S+) (.+)$", text, re.M):
        labels = re.findall(r"[{,](\w+)=", next(iter(re.findall(rf"^{name}(?:_bucket)?({{.*}}) ", text, re.M)), ""))
        rows.append((f"`{name}`", kinds[name], " ".join(f"`{label}`" for label in labels if label != "le"), meaning))
    lines = [
        "# Metrics",
        "",
        GENERATED,
        "",
        METRICS_TEXT,
        "",
        *_table(("metric", "type", "labels", "meaning"), rows),
    ]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "options.md": options,
    "commands.md": commands,
    "events.md": event_types,
    "metrics.md": metrics,
}


def main() -> int:
    """Write the pages that have changed."""
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stderr.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
