"""One timed launch of a script by one launcher."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping

from benchmarks.common import launchers, processes
from benchmarks.common.launchers import LAUNCHERS, Launcher
from benchmarks.common.output import progress
from benchmarks.common.paths import script
from benchmarks.launch.results import LaunchCase, LaunchSample
from phalanx.contract import events
from phalanx.launcher.runs import run_folder

TIMEOUT = 120.0  # seconds

_STAMPS = "BENCH_STAMPS"  # the scripts read it too: the file to which each rank appends one line
_IMPORT = f'import torch, os, time\nt = time.time()\nopen(os.environ["{_STAMPS}"], "w").write(f"0 {{t}} 1\\n")'


def launch(case: LaunchCase, number: int, inherited: Mapping[str, str], folder: str) -> LaunchSample:
    """Launch the script of a case once, as part of round `number`."""
    launcher = LAUNCHERS[case.contender]
    command = launcher.command(case.ranks, script(f"{case.end}.py"))
    sample = _timed(command, launchers.environment(launcher, case.ranks, inherited, folder), folder, case, number)
    if launcher.fork_server and not sample.failure:
        used = _fork_server_kind(launcher, folder)
        if used != launcher.fork_server:
            output = processes.last_output(folder)
            why = f"it used a {used} fork server instead of a {launcher.fork_server} one; its output: {output}"
            return LaunchSample(case, number, None, None, why)
    return sample


def import_torch(number: int, inherited: Mapping[str, str], folder: str) -> LaunchSample:
    """Measure one `import torch` in a fresh interpreter."""
    environ = launchers.environment(LAUNCHERS["torchrun"], 1, inherited, folder)
    return _timed([sys.executable, "-c", _IMPORT], environ, folder, LaunchCase("python", "import", 1), number)


def report_progress(title: str, sample: LaunchSample) -> None:
    """Print one line about a launch to standard error."""
    case = sample.case
    took = f"failed: {sample.failure}" if sample.failure else f"{sample.seconds:6.2f} s, ended {sample.total:6.2f} s"
    progress(title, f"{case.contender:<12}{case.end:<11}{case.ranks:>3} rank{'s' * (case.ranks > 1):<3}{took}")


def read_stamps(path: str, ranks: int) -> tuple[float, str]:
    """Return when the last rank passed the end point, or what is wrong: every rank must have met all others."""
    try:
        with open(path) as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:
        rows = []
    if {int(rank) for rank, _, _ in rows} != set(range(ranks)) or len(rows) != ranks:
        return 0.0, f"{len(rows)} of {ranks} ranks reached the end point"
    if any(int(world) != ranks for _, _, world in rows):
        return 0.0, f"a rank met {rows[0][2]} ranks instead of {ranks}"
    return max(float(reached) for _, reached, _ in rows), ""


def _timed(command: list[str], environ: Mapping[str, str], folder: str, case: LaunchCase, number: int) -> LaunchSample:
    stamps = os.path.join(folder, "stamps")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(stamps)
    start = time.time()
    process = processes.start_logged(command, {**environ, _STAMPS: stamps}, folder)
    try:
        ended = processes.wait_for_exit(process, TIMEOUT)
        end = time.time()
    finally:
        if process.returncode is None:
            processes.stop(process)
    failure = "" if ended else f"not finished after {TIMEOUT:.0f} s"
    if ended and process.returncode:
        failure = f"exit code {process.returncode}: {processes.last_output(folder)}"
    reached, wrong = read_stamps(stamps, case.ranks)
    if failure or wrong:
        return LaunchSample(case, number, None, None, failure or wrong)
    return LaunchSample(case, number, round(reached - start, 4), round(end - start, 4))


def _fork_server_kind(launcher: Launcher, folder: str) -> str:
    """Return the kind of fork server that the newest run of a launcher used: a fallback must not count."""
    runs = list(run_folder.all_runs(launchers.home(launcher, folder)))
    if not runs:
        return "unknown"
    with open(os.path.join(runs[-1].folder, "events.jsonl"), "rb") as file:
        kinds = [event.mode for event in map(events.decode, file) if isinstance(event, events.ForkServerReady)]
    return kinds[-1] if kinds else "unknown"
