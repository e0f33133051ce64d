"""`phalanx logs [RUN]`: prints what the ranks of a run have written, and follows a live run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import TextIO

from phalanx.cli import run_lookup
from phalanx.cli.options import values
from phalanx.contract.visible import visible_line
from phalanx.errors import LaunchError, OptionError, UsageError
from phalanx.launcher.runs import history, run_logs
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.launcher.runs.run_logs import KnownRanks, LineReader, LogFile
from phalanx.launcher.viewers import views
from phalanx.watch.charts.formatting import spans
from phalanx.watch.source import Source, Stream

_INTERVAL = 0.2  # seconds between two checks for new output
_IDLE = 4  # minimum pause as a multiple of the time of a check: a run may have thousands of ranks
_ASK_INTERVAL = 1.0  # seconds between two requests for the output of ranks on other hosts


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx logs`."""
    parser = argparse.ArgumentParser(
        prog="phalanx logs",
        description="Print what the ranks of a run have written, rank by rank. The run may be running or ended.",
    )
    parser.add_argument(
        "run", nargs="?", help="name from `phalanx ps --all`, a prefix of it, or a run folder (default: the newest run)"
    )
    parser.add_argument("-r", "--rank", metavar="RANKS", help="only these ranks: 3, or 0,2-3 (default: all)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="also print what is written from now on, until the run has ended"
    )
    parser.add_argument(
        "--tail", type=int, metavar="N", help="only the last N lines of each stream of each rank, in the newest attempt"
    )
    parser.add_argument("--stream", choices=run_logs.STREAMS, help="only this stream (default: both)")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx logs`. Return the exit code."""
    options = make_parser().parse_args(argv)
    if options.tail is not None and options.tail < 0:
        raise OptionError(f"--tail is {options.tail}, expected 0 or more lines", fix="phalanx logs --tail 20")
    wanted = None if options.rank is None else _ranks(options.rank)
    record = run_lookup.find(options.run, verb="logs") if options.run is not None else run_lookup.find_newest()
    record = history.leader_record(record)
    if options.run is None:
        sys.stderr.write(f"phalanx: {visible_line(f'{record.id} ({record.state})')}\n")
    streams = run_logs.STREAMS if options.stream is None else (options.stream,)
    printer = LogPrinter(record, wanted, streams, tail=options.tail, out=sys.stdout)
    printer.show(follow=options.follow)
    if printer.elsewhere:
        where = "their" if len(printer.elsewhere) > 1 else "its"
        sys.stderr.write(
            f"phalanx: rank {spans(printer.elsewhere)} ran on another host: {where} output is in the run folder there\n"
        )
    elif not printer.printed:
        sys.stderr.write(f"phalanx: {visible_line(record.id)}: no output{' so far' if record.alive else ''}\n")
    return 0


def _ranks(text: str) -> frozenset[int]:
    """Parse ranks: 0,2-3."""
    try:
        found = values.ranks(text)
        if found is None:
            raise ValueError("it contains no rank")
    except ValueError as error:
        expected = "expected ranks and ranges, separated by commas"
        raise OptionError(f"-r is {text!r}: {error}", details=[expected], fix="phalanx logs -r 0,2-3") from None
    return found


class LogPrinter:
    """Prints the logs of a run: first the existing output, by attempt and rank; then new output."""

    def __init__(
        self,
        record: RunRecord,
        wanted: Collection[int] | None,
        streams: Collection[str],
        *,
        tail: int | None,
        out: TextIO,
    ) -> None:
        self.printed = 0  # number of lines
        self.elsewhere: list[int] = []  # ranks whose output cannot be reached
        self._record = record
        self._source = views.of(record)
        self._wanted = wanted
        self._streams = streams
        self._tail = tail
        self._out = out
        self._files: dict[tuple[str, str], LogFile] = {}
        self._prefixes = False
        self._attempt: int | None = None  # the attempt whose header was printed last

    def show(self, *, follow: bool) -> None:
        """Print everything. With `follow`, return when the run has ended."""
        self._check_ranks(follow=follow)
        elsewhere = RemoteRanks(self._source, self._wanted, self._streams, tail=self._tail)
        known = KnownRanks(self._record.folder)
        asked = 0.0
        while True:
            began = time.monotonic()
            alive = self._source.alive
            self._print_new()
            if alive and began - asked >= _ASK_INTERVAL:
                asked = began
                here = {file.log.rank for file in self._files.values()}
                elsewhere.read([rank for rank in known.read() if rank not in here], self._print)
            if not (alive and follow):
                break
            time.sleep(max(_INTERVAL, _IDLE * (time.monotonic() - began)))
        for file in self._files.values():
            self._print(file.log.rank, file.last_line())
        here = {file.log.rank for file in self._files.values()} | elsewhere.reached
        wanted = known.read() if self._wanted is None else known.read() & set(self._wanted)
        self.elsewhere = sorted(wanted - here)
        self._out.flush()

    def _check_ranks(self, *, follow: bool) -> None:
        known = sorted(
            {log.rank for log in run_logs.find(self._record.folder)} | KnownRanks(self._record.folder).read()
        )
        self._prefixes = (len(known) if self._wanted is None else len(self._wanted)) != 1
        if self._wanted is None or not known or (follow and self._source.alive):
            return
        missing = sorted(set(self._wanted) - set(known))
        if missing:
            has = f"rank{'s' if len(known) > 1 else ''} {spans(known)}"
            raise UsageError(
                f"there is no rank {missing[-1]}: {self._record.id} has {has}",
                fix=f"phalanx logs {self._record.id} -r {known[0]}",
            )

    def _print_new(self) -> None:
        logs = [log for log in run_logs.find(self._record.folder) if self._wanted is None or log.rank in self._wanted]
        newest = max((log.attempt for log in logs), default=0)
        first = not self._files
        for log in logs:
            if self._tail is not None and first and log.attempt < newest:
                continue
            for stream in self._streams:
                key = (log.folder, stream)
                if key not in self._files:
                    self._files[key] = LogFile(log, stream, tail=self._tail if first else None)
        self._prefixes = self._prefixes or len({log.rank for log in logs}) > 1
        for file in sorted(self._files.values(), key=lambda file: file.log):
            self._print(file.log.rank, file.new_lines(), file.log.attempt if newest else None)
        self._out.flush()

    def _print(self, rank: int, lines: Iterator[str], attempt: int | None = None) -> None:
        prefix = f"[{rank}] " if self._prefixes else ""
        for line in lines:
            if attempt is not None and attempt != self._attempt:
                self._out.write(f"--- attempt {attempt} ---\n")
                self._attempt = attempt
            self._out.write(f"{prefix}{line}\n")
            self.printed += 1


class RemoteRanks:
    """Ranks of a live run whose files are on other hosts. The agent sends their output, of the newest attempt only."""

    def __init__(
        self, source: Source, wanted: Collection[int] | None, streams: Collection[str], *, tail: int | None
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._streams = streams
        self._tail = tail
        self.reached: set[int] = set()
        self._at: dict[tuple[int, str], int] = {}
        self._lines: dict[tuple[int, str], LineReader] = {}

    def read(self, ranks: Collection[int], show: Callable[[int, Iterator[str]], None]) -> None:
        """Call `show` with the new lines of these ranks."""
        for rank in ranks:
            for stream in self._streams if self._wanted is None or rank in self._wanted else ():
                with contextlib.suppress(LaunchError, OSError):  # the run has ended, or a node does not answer
                    show(rank, iter(self._new(rank, "stderr" if stream == "stderr" else "stdout")))
                    self.reached.add(rank)

    def _new(self, rank: int, stream: Stream) -> list[str]:
        key = (rank, stream)
        found: list[str] = []
        begins = key not in self._at
        lines = self._lines.setdefault(key, LineReader())
        while True:
            start = None if begins and self._tail is not None else self._at.get(key, 0)
            part = asyncio.run(self._source.log(rank, stream, start=start))
            found += lines.feed(part.text.encode())
            self._at[key] = part.end
            if start is None or part.end == part.start:
                break
        return found[-self._tail :] if begins and self._tail else [] if begins and self._tail == 0 else found
