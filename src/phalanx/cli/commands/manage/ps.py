"""`phalanx ps`: lists the runs of this user on this machine, and deletes ended ones."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from phalanx.cli import run_lookup
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.visible import visible_line
from phalanx.errors import OptionError, UsageError
from phalanx.launcher.runs import deletion, history, metadata, run_folder, summary
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.launcher.runs.summary import RunSummary
from phalanx.watch.charts.formatting import number

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_WHAT = 48  # maximum characters of a command


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx ps`."""
    parser = argparse.ArgumentParser(prog="phalanx ps", description="List running runs, or all runs.")
    parser.add_argument(
        "run", nargs="*", help="only runs, running or ended, with this name or prefix of it (default: all running ones)"
    )
    parser.add_argument("-a", "--all", action="store_true", help="also runs that have ended")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with metadata")
    parser.add_argument(
        "--forget",
        nargs="*",
        metavar="RUN",
        help="delete these ended runs, with their folders and logs; with --older: all ended runs of that age",
    )
    parser.add_argument("--older", metavar="AGE", help="with --forget: runs that started longer ago than 12h, 30d …")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx ps`. Return the exit code."""
    options = make_parser().parse_args(argv)
    base = run_folder.home(environment())
    if options.run and (options.forget is not None or options.older is not None):
        raise OptionError(
            "--forget takes the names itself", fix=shlex.join(["phalanx", "ps", "--forget", *options.run])
        )
    if options.forget is not None or options.older is not None:
        return _forget(base, options.forget, options.older)
    if options.run:
        runs = run_lookup.named(options.run)
    else:
        runs = [run for run in run_folder.all_runs(base) if options.all or run.alive]
    if options.json:
        for run in runs:
            facts = asdict(summary.of(run))
            found = metadata.read(history.leader_record(run).folder)
            facts["metadata"] = msgspec.to_builtins(metadata.without_diff(found)) if found is not None else None
            if facts["loss"] is not None and not math.isfinite(facts["loss"]):
                facts["loss"] = str(facts["loss"])  # not a JSON number
            sys.stdout.write(json.dumps({**asdict(run), "state": run.state, **facts}) + "\n")
        return 0
    if not runs:
        sys.stdout.write("nothing is running\n" if not options.all else "no runs yet\n")
        return 0
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    for line in table([(run, summary.of(run)) for run in runs], width or None, now=time.time()):
        sys.stdout.write(line + "\n")
    return 0


def table(runs: Sequence[tuple[RunRecord, RunSummary]], width: int | None, *, now: float) -> list[str]:
    """Return the table as lines. `width` is that of the terminal; None: not a terminal, one line per run.

    In a terminal no line exceeds the width: folders are left out, long cells are cut, and the reason of a failure gets
    its own line.
    """
    rows = [["RUN", "STATE", "RANKS", "STARTED", "FOR", "STEP", "LOSS", "FAULTS", "COMMAND", "REASON", "FOLDER"]]
    for run, facts in runs:
        lasted = "?" if run.state == "killed" else _duration((run.ended or now) - run.started)
        step = "-" if facts.step is None else str(facts.step)
        loss = "-" if facts.loss is None else number(facts.loss)
        faults = str(facts.faults) if facts.faults else "-"
        command = _command(run.command)
        command = command if len(command) <= _WHAT else _cut(_command(_without_folders(run.command)), _WHAT)
        ranks, began = str(run.world_size), _clock(run.started, now)
        row = [run.id, run.state, ranks, began, lasted, step, loss, faults, command, facts.why or "-", run.folder]
        rows.append([visible_line(cell) for cell in row])
    if width is None or max(map(len, _aligned(rows))) <= width:
        return _aligned(rows)
    for row, (run, _) in zip(rows[1:], runs, strict=True):
        row[8] = _command(_without_folders(run.command))
    rows = [row[:9] for row in rows]
    reasons = ["", *(facts.why for _, facts in runs)]
    lines = []
    for line, why in zip(_aligned(rows), reasons, strict=True):
        lines.append(_cut(line, width))
        if why:
            lines.append(_cut(f"    {visible_line(why)}", width))
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(most) for cell, most in zip(row, widths, strict=True)).rstrip() for row in rows]


def _forget(base: str, names: list[str] | None, older: str | None) -> int:
    runs = list(run_folder.all_runs(base))
    if names is None:
        raise OptionError("--older needs --forget", fix=f"phalanx ps --forget --older {older}")
    if not names and older is None:
        raise OptionError("which runs?", fix="phalanx ps --forget RUN, or --forget --older 30d")
    if names:
        chosen = [_named(name, runs) for name in names]
    else:
        chosen = [run for run in runs if not run.alive and (run.ended is not None or run.here)]
    if older is not None:
        oldest = time.time() - _age(older)
        chosen = [run for run in chosen if run.started < oldest]
    refused: UsageError | None = None  # a run that cannot be deleted does not stop the deletion of others
    for run in chosen:
        try:
            deletion.delete(base, run)
            sys.stdout.write(f"forgot {visible_line(run.id)}\n")
        except UsageError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    if not chosen:
        sys.stdout.write(f"no run is older than {older}\n")
    return 0


def _named(name: str, runs: Sequence[RunRecord]) -> RunRecord:
    """Find a run by its full name. Deletion never guesses: a name that several runs have is refused."""
    found = [run for run in runs if name in (run.id, f"{run.id}.1")]
    same = [run.id for run in runs if run.name == name]
    if len(same) > 1:
        first = [f"{name}.1" if one == name else one for one in same]
        raise UsageError(f"{len(same)} runs are called {name}", details=first, fix=f"phalanx ps --forget {first[0]}")
    found = found if len(found) < 2 else [run for run in runs if os.path.basename(run.folder) == name]
    if len(found) == 1:
        return found[0]
    near = [run.id for run in runs if run.id.startswith(name)][:5]
    raise UsageError(
        f"no run is called {name}",
        details=[f"similar: {', '.join(near)}"] if near else [],
        fix=f"phalanx ps --forget {near[0]}" if near else "phalanx ps --all",
    )


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise OptionError(f"--older {text} is not an age", fix="--older 12h, 30d, 8w")
    return float(int(match[1]) * _AGES[match[2]])


def _command(words: Sequence[str]) -> str:
    """Return a command on one line, without control characters and without the interpreter."""
    shown = list(words)
    if shown and os.path.basename(shown[0]).startswith("python"):
        shown = shown[2:] if shown[1:2] == ["-u"] else shown[1:]
    return visible_line(shlex.join(shown or words))


def _without_folders(words: Sequence[str]) -> list[str]:
    """Return a command with only the last part of each path: arguments are more useful than folders."""
    return [os.path.basename(word.rstrip(os.sep)) if os.sep in word else word for word in words]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _clock(when: float, now: float) -> str:
    """Return the time of day, with the date if it is more than 12 hours ago."""
    moment = time.localtime(when)
    return time.strftime("%H:%M:%S" if 0 <= now - when < 12 * 3600 else "%Y-%m-%d %H:%M", moment)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
