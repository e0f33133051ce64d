"""`phalanx ps`: the runs of this user on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict

from phalanx.cluster.sources.surroundings import environment
from phalanx.launch import runfolder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx ps", description="List runs: those that are running, or all.")
    parser.add_argument("-a", "--all", action="store_true", help="also runs that have ended")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    runs = [run for run in runfolder.all_runs(runfolder.home(environment())) if options.all or run.alive]
    if options.json:
        for run in runs:
            sys.stdout.write(json.dumps({**asdict(run), "state": run.state}) + "\n")
        return 0
    if not runs:
        sys.stdout.write("nothing is running\n" if not options.all else "no runs yet\n")
        return 0
    rows = [("RUN", "STATE", "RANKS", "FOR", "COMMAND", "FOLDER")]
    for run in runs:
        seconds = (run.ended or time.time()) - run.started
        lasted = "?" if run.state == "killed" else _duration(seconds)
        rows.append((run.id, run.state, str(run.world_size), lasted, shlex.join(run.command)[:48], run.folder))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    return 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
