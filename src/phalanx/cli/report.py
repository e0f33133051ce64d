"""`phalanx report [RUN]`: one HTML file of a run, to share with somebody who was not there."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from phalanx.cli import compare, document
from phalanx.contract import events
from phalanx.launch import postmortem, recollection
from phalanx.launch.runfolder import RunRecord
from phalanx.version import __version__
from phalanx.watch import comparison, report
from phalanx.watch.ledger import Ledger
from phalanx.watch.report import Account, Stood, Tail
from phalanx.watch.scene import Scene

_RANKS = 32  # of which the ends of logs are shown
_TAIL = 16_000  # bytes of each stream


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="phalanx report",
        description="One HTML file of a run, that has ended or goes on, to share: what ran, how fast, what failed and "
        "what it cost. It needs no network and no script. What looks like a password or a token is masked.",
    )
    parser.add_argument("run", nargs="?", help="its id as `phalanx ps --all` shows it, or its folder (the last)")
    parser.add_argument("-o", "--output", metavar="FILE", help="where it is written (RUN.html); -: standard output")
    parser.add_argument("-f", "--force", action="store_true", help="write over a FILE that is no report")
    parser.add_argument("--no-logs", action="store_true", help="without what ranks have written")
    options = parser.parse_args(argv)
    record = compare.record_of(options.run, verb="report")
    text = made(record, with_logs=not options.no_logs)
    if options.output == "-":
        sys.stdout.write(text)
        return 0
    path = options.output or f"{record.id}.html"
    where = document.write(path, text, sign=report.SIGN, force=options.force, what="report")
    sys.stdout.write(f"{where}\n")
    return 0


def made(record: RunRecord, *, with_logs: bool = True) -> str:
    scene, ledger, told = Scene(), Ledger(), []
    for event in recollection.events_of(record):
        scene.see(event)
        ledger.see(event)
        told.append(event)
    course = comparison.course(record.id, told, state=record.state)
    remains = postmortem.read(record)
    ended_badly = not record.alive and record.code != 0
    account = Account(
        run=record.id,
        state=record.state,
        command=tuple(record.command),
        version=__version__,
        made=time.time(),
        host=record.host,
        cwd=record.cwd,
        folder=record.folder,
        started=record.started,
        cause=postmortem.report(remains) if ended_badly else "",
        stood=tuple(Stood(texts, stacks) for texts, stacks in recollection.stalls_of(record)),
        tails=tuple(_tails(record, _interesting(told, scene))) if with_logs else (),
        with_logs=with_logs,
    )
    return report.html(account, scene, course, ledger)


def _interesting(happened: Iterable[events.AnyEvent], scene: Scene) -> list[int]:
    """Ranks whose words are worth reading: who failed, who was blamed, then the first ones."""
    ranks: dict[int, None] = {}
    for event in happened:
        match event:
            case events.WorkerFailed() | events.Fault():
                ranks[event.rank] = None
            case events.Verdict():
                ranks |= dict.fromkeys(event.ranks[:8])
    return list(ranks | dict.fromkeys(range(scene.world_size or len(scene.ranks))))[:_RANKS]


def _tails(record: RunRecord, ranks: Iterable[int]) -> Iterable[Tail]:
    for rank in sorted(ranks):
        for stream in ("stdout", "stderr"):
            text, whole = recollection.tail(record, rank, stream, _TAIL)
            if text.strip():
                yield Tail(rank, stream, text, whole)
