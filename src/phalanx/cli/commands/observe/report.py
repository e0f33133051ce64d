"""`phalanx report [RUN]`: writes one HTML file about a run, to share."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.cli import output_file, run_lookup
from phalanx.contract import encoding, events
from phalanx.launcher.runs import history, postmortem
from phalanx.launcher.runs.finished_run import FinishedRun
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.version import __version__
from phalanx.watch.html import masking, report
from phalanx.watch.html.comparison import ComparedRunBuilder
from phalanx.watch.html.report_context import ReportContext, ReportTail, StallEvidence
from phalanx.watch.model.incidents import Incidents
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.series.strip import TICK
from phalanx.watch.page import assets
from phalanx.watch.page.updates import Updates
from phalanx.watch.source import Stream

_RANKS = 32  # maximum ranks whose logs are included
_TAIL = 16_000  # maximum bytes of each stream
_PHASES = 1_500_000  # maximum characters for the phases of all ranks
_MOST_PHASES = 6000  # maximum phases of one rank
_POINTS = 40_000  # maximum points of all curves
_STACKS = 128  # maximum ranks whose stacks are included
_STACK = 10_000  # maximum characters of each stack
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx report`."""
    parser = argparse.ArgumentParser(
        prog="phalanx report",
        description="Write one HTML file about a run, running or ended: what ran, how fast, what failed and what that "
        "cost. It needs no network. Passwords and tokens are masked.",
    )
    parser.add_argument("run", nargs="?", help="name from `phalanx ps --all`, or its folder (default: the last run)")
    parser.add_argument("-o", "--output", metavar="FILE", help="output file (default: RUN.html); - is standard output")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite a FILE that is not a report")
    parser.add_argument("--no-logs", action="store_true", help="leave out the output of the ranks")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx report`. Return the exit code."""
    options = make_parser().parse_args(argv)
    record = history.leader_record(run_lookup.find(options.run, verb="report"))
    text = render(record, with_logs=not options.no_logs)
    if options.output == "-":
        sys.stdout.write(text)
        return 0
    path = options.output or f"{record.id}.html"
    where = output_file.write(path, text, marker=report.SIGN, force=options.force, what="report")
    sys.stdout.write(f"{where}\n")
    return 0


def render(record: RunRecord, *, with_logs: bool = True) -> str:
    """Return the report of a run as HTML."""
    builder, incidents, blamed = ComparedRunBuilder(record.id), Incidents(), Blamed()
    history.read(record, lambda event: [apply(event) for apply in (builder.apply, incidents.apply, blamed.apply)])
    model, remains = builder.model, postmortem.read(record)
    ended_badly = not record.alive and record.code != 0
    ranks = list(blamed.ranks | dict.fromkeys(range(model.ranks.world_size or len(model.ranks))))[:_RANKS]
    context = ReportContext(
        run=record.id,
        state=record.state,
        command=tuple(record.command),
        version=__version__,
        made=time.time(),
        host=record.host,
        cwd=record.cwd,
        folder=record.folder,
        started=record.started,
        first=postmortem.first(remains) if ended_badly else "",
        cause=postmortem.report(remains) if ended_badly else "",
        stalls=tuple(StallEvidence(texts, stacks) for texts, stacks in history.stalls_of(record)),
        tails=asyncio.run(_tails(record, sorted(ranks))) if with_logs else (),
        with_logs=with_logs,
    )
    page = asyncio.run(_page(record, model, context))
    return report.html(context, model, builder.build(record.state), incidents, page=page)


async def _page(record: RunRecord, model: RunModel, context: ReportContext) -> str:
    """Return the browser page with its data, with as many phases as fit."""
    letters = min(_MOST_PHASES, _PHASES // max(1, len(model.ranks)))
    logs: dict[str, dict[str, str]] = {}
    for tail in context.tails:
        logs.setdefault(str(tail.rank), {})[tail.stream] = report.plain(tail.text)
    why = await FinishedRun(record).why()
    stacks = {rank: text[:_STACK] for rank, text in itertools.islice(why.stacks.items(), _STACKS)}
    whole = Updates(model, seconds=letters * TICK).whole()
    every = math.ceil(sum(map(len, whole.curves.values())) / _POINTS) or 1
    curves = {name: [*points[:-1:every], points[-1]] for name, points in whole.curves.items() if points}
    data = {
        "whole": msgspec.structs.replace(whole, curves=curves),
        "logs": logs,
        "why": msgspec.structs.replace(why, stacks=stacks),
    }
    return assets.inlined(encoding.encode(_masked(msgspec.to_builtins(data, str_keys=True))).decode())


def _masked(data: Any) -> Any:
    """Mask each text by itself: in the whole JSON, the values of a metric named "tokens" would look like secrets."""
    match data:
        case str():
            return masking.hidden(data)
        case dict():
            return {
                name: masking.value_of(name, value) if isinstance(value, str) else _masked(value)
                for name, value in data.items()
            }
        case list() | tuple() if data and all(isinstance(word, str) for word in data):  # possibly a command
            return masking.command(data)
        case list() | tuple() if any(isinstance(value, str | dict | list | tuple) for value in data):
            return [_masked(value) for value in data]
    return data


@dataclass
class Blamed:
    """Collects the ranks whose logs come first: those that failed or were blamed."""

    ranks: dict[int, None] = field(default_factory=dict)

    def apply(self, event: events.AnyEvent) -> None:
        """Add the ranks of an event."""
        match event:
            case events.WorkerFailed() | events.FaultEvent():
                self.ranks[event.rank] = None
            case events.VerdictEvent():
                self.ranks |= dict.fromkeys(event.ranks[:8])


async def _tails(record: RunRecord, ranks: Sequence[int]) -> tuple[ReportTail, ...]:
    source, found = FinishedRun(record), []
    for rank in ranks:
        for stream in _STREAMS:
            part = await source.log(rank, stream, size=_TAIL)
            if part.text.strip():
                found.append(ReportTail(rank, stream, part.text, part.end))
    return tuple(found)
