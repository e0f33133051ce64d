"""Findings for a reader: what is wrong first, with cause and fix; what is well, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.doctor.finding import LEVELS, Finding, worst
from phalanx.doctor.pairs import Pair
from phalanx.doctor.quantity import seconds, speed
from phalanx.doctor.result import Result

_MOST = 8  # nodes, up to which every pair has a place on the screen
_STYLES = {"red": "bold red", "yellow": "bold yellow", "green": "green"}


def as_json(result: Result) -> dict[str, Any]:
    return {
        "level": worst(result.findings),
        "nodes": list(result.nodes),
        "findings": [asdict(finding) for finding in ordered(result.findings)],
        "pairs": [asdict(pair) for pair in result.pairs],
        "collectives": [{**asdict(one), "bus": one.bus} for one in result.collectives],
    }


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """The worst first; otherwise as they were found."""
    return sorted(findings, key=lambda finding: -LEVELS.index(finding.level))


def show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for finding in ordered(result.findings):
        if finding.level == "green":
            break
        where = f" on {finding.node}" if finding.node and len(result.nodes) > 1 else ""
        title = (f"{finding.level:<8}", _STYLES[finding.level]), (f"{finding.check}{where}", "bold")
        console.print(Text.assemble(*title, f": {finding.fact}"))
        for name, text in (("cause", finding.cause), ("fix", finding.fix)):
            if text:
                console.print(Text.assemble((f"          {name + ':':<7}", "dim"), text))
    for check, fact in compact([finding for finding in result.findings if finding.level == "green"]):
        console.print(Text.assemble((f"{'green':<8}", _STYLES["green"]), (f"{check:<14}", "bold"), fact))
    real = [pair for pair in result.pairs if not pair.local]
    if len(real) > 1:
        console.print()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for row in matrix(result.nodes, real) if len(result.nodes) <= _MOST else slowest(real):
            if not table.columns:
                for title_ in row:
                    table.add_column(Text(title_))
            else:
                table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    console.print()
    console.print(Text(summary(result.findings), style=_STYLES[worst(result.findings)]))


def compact(greens: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """A line a check: what all nodes have in common, or the first few by name."""
    checks: dict[str, list[Finding]] = {}
    for finding in greens:
        checks.setdefault(finding.check, []).append(finding)
    for check, findings in checks.items():
        facts: dict[str, list[str]] = {}
        for finding in findings:
            facts.setdefault(finding.fact, []).append(finding.node)
        if len(facts) == 1:
            yield check, next(iter(facts))
        else:
            told = [f"{', '.join(nodes)}: {fact}" if all(nodes) else fact for fact, nodes in facts.items()]
            yield check, "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")


def matrix(nodes: Sequence[str], pairs: Sequence[Pair]) -> Iterator[list[str]]:
    """From the node of the row to that of the column: latency and speed. The titles come first."""
    yield ["from \\ to", *nodes]
    cells = {}
    for pair in pairs:
        cells[pair.one, pair.other] = f"{seconds(pair.latency)}, {speed(pair.there)}"
        cells[pair.other, pair.one] = f"{seconds(pair.latency)}, {speed(pair.back)}"
    for node in nodes:
        yield [node, *(cells.get((node, other), "·") for other in nodes)]


def slowest(pairs: Sequence[Pair], most: int = 10) -> Iterator[list[str]]:
    yield ["slowest pairs", "latency", "there", "back"]
    for pair in sorted(pairs, key=lambda pair: pair.slowest)[:most]:
        yield [str(pair), seconds(pair.latency), speed(pair.there), speed(pair.back)]


def summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in reversed(LEVELS)}
    if not counts["red"] and not counts["yellow"]:
        return "all is well"
    return ", ".join(f"{count} {level}" for level, count in counts.items() if count)
