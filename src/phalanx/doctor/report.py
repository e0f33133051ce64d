"""Prints the findings: problems first, with cause and fix; then what is OK, one line each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.contract.visible import visible
from phalanx.doctor.finding import LEVELS, Finding, worst
from phalanx.doctor.pairs import HostPair
from phalanx.doctor.quantity import seconds, speed
from phalanx.doctor.result import Result

if TYPE_CHECKING:
    from rich.console import Console

_MOST = 8  # largest number of nodes for which the matrix of all pairs is printed
_FEW = 4  # facts per check
_LEVEL, _DETAIL, _GREEN = 8, 17, 22  # columns where the text after these begins
_NARROWEST = 20
_STYLES = {"red": "bold red", "yellow": "bold yellow", "green": "green"}


def as_json(result: Result) -> dict[str, Any]:
    """Return the result for `--json`."""
    return {
        "level": worst(result.findings),
        "nodes": list(result.nodes),
        "findings": [asdict(finding) for finding in ordered(result.findings)],
        "pairs": [asdict(pair) for pair in result.pairs],
        "collectives": [{**asdict(one), "bus": one.bus} for one in result.collectives],
    }


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, worst first."""
    return sorted(findings, key=lambda finding: -LEVELS.index(finding.level))


def show(result: Result) -> None:
    """Print the result."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    width = console.width if console.is_terminal else 0  # a file has no width: do not wrap

    def put(*head: tuple[str, str], text: str, hang: int) -> None:
        indent = sum(len(part) for part, _ in head)
        lines = wrapped(visible(text), width, indent, hang)
        console.print(Text.assemble(*head, "\n".join(lines)))

    for finding in ordered(result.findings):
        if finding.level == "green":
            break
        where = f" on {finding.node}" if finding.node and (finding.node,) != result.nodes else ""
        level = f"{finding.level:<{_LEVEL}}"
        title = f"{finding.check}{visible(where)}: "
        put((level, _STYLES[finding.level]), (title, "bold"), text=finding.fact, hang=_LEVEL)
        for name, text in (("cause", finding.cause), ("fix", finding.fix)):
            if text:
                put((f"          {name + ':':<7}", "dim"), text=text, hang=_DETAIL)
    for check, facts in compact([finding for finding in result.findings if finding.level == "green"]):
        head = ("green   ", _STYLES["green"]), (f"{check:<14}", "bold")
        for place, fact in enumerate(facts if width else ["; ".join(facts)]):
            put(*(head if place == 0 else [(" " * _GREEN, "")]), text=fact, hang=_GREEN)
    _show_pairs(console, result, width)
    console.print()
    console.print(Text(summary(result.findings), style=_STYLES[worst(result.findings)]))


def _show_pairs(console: Console, result: Result, width: int) -> None:
    from rich.table import Table
    from rich.text import Text

    real = [pair for pair in result.pairs if not pair.local]
    if len(real) < 2:
        return
    tables = [matrix(result.nodes, real)] if len(result.nodes) <= _MOST else []
    for rows in (*tables, slowest(real)):
        table = Table(box=None, pad_edge=False, header_style="bold")
        titles, *lines = rows
        for title in titles:
            table.add_column(Text(visible(title)), no_wrap=True)
        for line in lines:
            table.add_row(*(Text(visible(cell)) for cell in line))
        if not width or console.measure(table, options=console.options.update(width=1000)).maximum <= width:
            break  # otherwise try the next layout, which is narrower
    console.print()
    console.print(table)


def wrapped(text: str, width: int, indent: int, hang: int) -> list[str]:
    """Return the text in lines: the first is indented by `indent`, the others by `hang`. Width 0: no wrapping."""
    if not width:
        return [text]
    # Never break a word: it may be a path or a command.
    lines = textwrap.wrap(
        " " * indent + text,
        max(width, hang + _NARROWEST),
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [lines[0][indent:], *lines[1:]] if lines else [""]


def compact(greens: Sequence[Finding]) -> Iterator[tuple[str, list[str]]]:
    """Yield per check the facts that all nodes share, then the first few others by node."""
    checks: dict[str, list[Finding]] = {}
    for finding in greens:
        checks.setdefault(finding.check, []).append(finding)
    for check, findings in checks.items():
        facts: dict[str, list[str]] = {}
        for finding in sorted(findings, key=lambda finding: finding.node != ""):
            facts.setdefault(finding.fact, []).append(finding.node)
        if len(facts) == 1:
            yield check, list(facts)
        else:
            parts = [f"{', '.join(nodes)}: {fact}" if all(nodes) else fact for fact, nodes in facts.items()]
            yield check, parts[:_FEW] + ([f"and {len(parts) - _FEW} more"] if len(parts) > _FEW else [])


def matrix(nodes: Sequence[str], pairs: Sequence[HostPair]) -> Iterator[list[str]]:
    """Yield the matrix of latency and speed, header first: from the node of the row to the node of the column."""
    yield ["from \\ to", *nodes]
    cells = {}
    for pair in pairs:
        cells[pair.one, pair.other] = f"{seconds(pair.latency)}, {speed(pair.there)}"
        cells[pair.other, pair.one] = f"{seconds(pair.latency)}, {speed(pair.back)}"
    for node in nodes:
        yield [node, *(cells.get((node, other), "·") for other in nodes)]


def slowest(pairs: Sequence[HostPair], most: int = 10) -> Iterator[list[str]]:
    """Yield the rows of the slowest links, with a header."""
    yield ["slowest pairs", "latency", "there", "back"]
    for pair in sorted(pairs, key=lambda pair: pair.slowest)[:most]:
        yield [str(pair), seconds(pair.latency), speed(pair.there), speed(pair.back)]


def summary(findings: Sequence[Finding]) -> str:
    """Return the number of findings per level."""
    counts = {level: sum(finding.level == level for finding in findings) for level in reversed(LEVELS)}
    if not counts["red"] and not counts["yellow"]:
        return "no problems found"
    return ", ".join(f"{count} {level}" for level, count in counts.items() if count)
