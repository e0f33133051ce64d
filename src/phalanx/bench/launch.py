"""How long from the command to the first all_reduce, and to the first training step, on N ranks?

A launch starts just before its process is made and has reached its end point when the last rank has passed it.
Every contender runs once a round for every number of ranks, in an order that turns from case to case, so that
whatever else this machine does meanwhile hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from phalanx.bench import contenders
from phalanx.bench.contenders import CONTENDERS, Contender
from phalanx.bench.results import ENDS, Case, Results, Sample, Settings
from phalanx.contract import events
from phalanx.errors import OptionError
from phalanx.launch.runs import run_folder

TIMEOUT = 120.0

_SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts")
_STAMPS = "BENCH_STAMPS"  # the scripts know it too
OUTPUT = "output"
_IMPORT = f'import torch, os, time\nt = time.time()\nopen(os.environ["{_STAMPS}"], "w").write(f"0 {{t}} 1\\n")'


def rotated(names: Sequence[str], turn: int) -> tuple[str, ...]:
    first = turn % len(names)
    return (*names[first:], *names[:first])


def schedule(settings: Settings, number: int) -> Iterator[Case]:
    """One round. Contenders of the same case follow each other, so that they meet the same machine."""
    for place, (end, ranks) in enumerate(product(settings.ends, settings.ranks)):
        for name in rotated(settings.contenders, number + place):
            yield Case(name, end, ranks)


def measure(settings: Settings, inherited: Mapping[str, str]) -> Results:
    results = Results(settings)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        if "warm" in settings.contenders:
            stack.enter_context(contenders.kept_warm(CONTENDERS["warm"], inherited, folder))
        for name, end in product(settings.contenders, settings.ends):
            # Fills the page cache, and lets a phalanx fork server learn what the script imports.
            tell("rehearsal", launched(Case(name, end, min(settings.ranks)), 0, inherited, folder))
        for number in range(1, settings.repeat + 1):
            title = f"round {number} of {settings.repeat}"
            results.imports.append(_import_torch(number, inherited, folder))
            tell(title, results.imports[-1])
            for case in schedule(settings, number):
                results.samples.append(launched(case, number, inherited, folder))
                tell(title, results.samples[-1])
    return results


def tell(title: str, sample: Sample) -> None:
    case = sample.case
    took = f"failed: {sample.failure}" if sample.failure else f"{sample.seconds:6.2f} s, ended {sample.total:6.2f} s"
    sys.stderr.write(
        f"{title:<16}{case.contender:<12}{case.end:<11}{case.ranks:>3} rank{'s' * (case.ranks > 1):<3}{took}\n"
    )


def launched(case: Case, number: int, inherited: Mapping[str, str], folder: str) -> Sample:
    contender = CONTENDERS[case.contender]
    line = contender.line(case.ranks, os.path.join(_SCRIPTS, f"{case.end}.py"))
    sample = _timed(line, contenders.environment(contender, case.ranks, inherited, folder), folder, case, number)
    if contender.way and not sample.failure:
        way = _way(contender, folder)
        if way != contender.way:
            why = f"its workers were made the {way} way, not {contender.way}; it said: {said(folder)}"
            return Sample(case, number, None, None, why)
    return sample


def _import_torch(number: int, inherited: Mapping[str, str], folder: str) -> Sample:
    environ = contenders.environment(CONTENDERS["torchrun"], 1, inherited, folder)
    return _timed([sys.executable, "-c", _IMPORT], environ, folder, Case("python", "import", 1), number)


def _timed(line: list[str], environ: Mapping[str, str], folder: str, case: Case, number: int) -> Sample:
    stamps = os.path.join(folder, "stamps")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(stamps)
    with open(os.path.join(folder, OUTPUT), "wb") as output:
        start = time.time()
        process = subprocess.Popen(
            line,
            env={**environ, _STAMPS: stamps},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            over = _ended(process, TIMEOUT)
            end = time.time()
        finally:
            if process.returncode is None:
                stop(process)
    failure = "" if over else f"not over after {TIMEOUT:.0f} s"
    if over and process.returncode:
        failure = f"exit code {process.returncode}: {said(folder)}"
    reached, wrong = _read(stamps, case.ranks)
    if failure or wrong:
        return Sample(case, number, None, None, failure or wrong)
    return Sample(case, number, round(reached - start, 4), round(end - start, 4))


def _ended(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Told by the kernel at once: Popen.wait with a timeout looks only every 50 ms."""
    handle = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([handle], [], [], timeout)
    finally:
        os.close(handle)
    if ready:
        process.wait()
    return bool(ready)


def stop(process: subprocess.Popen[bytes]) -> None:
    """The launcher may end its ranks by itself; whatever of them is left then is killed."""
    import psutil

    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    if not _ended(process, 10.0):
        process.kill()
        process.wait()
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _read(stamps: str, ranks: int) -> tuple[float, str]:
    """When the last rank passed the end point, or what is wrong: every rank must have met all others."""
    try:
        with open(stamps) as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:
        rows = []
    if {int(rank) for rank, _, _ in rows} != set(range(ranks)) or len(rows) != ranks:
        return 0.0, f"{len(rows)} of {ranks} ranks reached the end point"
    if any(int(seen) != ranks for _, _, seen in rows):
        return 0.0, f"a rank met {rows[0][2]} ranks instead of {ranks}"
    return max(float(reached) for _, reached, _ in rows), ""


def said(folder: str) -> str:
    """The end of the last launch's output, on one line."""
    with open(os.path.join(folder, OUTPUT), errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return " / ".join(lines[-3:])[-300:] or "nothing"


def _way(contender: Contender, folder: str) -> str:
    """How the newest run of this contender made its workers: a fallback must not pass for the real thing."""
    runs = list(run_folder.all_runs(contenders.home(contender, folder)))
    if not runs:
        return "unknown"
    with open(os.path.join(runs[-1].folder, "events.jsonl"), "rb") as file:
        ways = [event.mode for event in map(events.decode, file) if isinstance(event, events.ForkServerReady)]
    return ways[-1] if ways else "unknown"


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    settings = Settings(
        ranks=_numbers(options.ranks),
        repeat=options.repeat,
        contenders=chosen("--contenders", options.contenders, CONTENDERS),
        ends=chosen("--end", options.end, ENDS),
    )
    if settings.repeat < 1:
        raise OptionError(f"--repeat {settings.repeat}: at least one round is needed", fix="--repeat 5")
    for name in settings.contenders:
        contenders.check_installed(CONTENDERS[name])
    from phalanx.bench import machine, report

    before = machine.machine()
    results = measure(settings, inherited)
    written = report.Report(results, before, os.getloadavg())
    paths = written.save(options.out)
    if options.json:
        sys.stdout.write(written.json())
    else:
        written.show()
        sys.stderr.write(f"written: {', '.join(paths)}\n")
    return 1 if results.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench launch",
        description="Time from the command to the first all_reduce and to the first AdamW step of a DDP model, "
        "gloo on the CPU, for phalanx and its peers side by side.",
    )
    parser.add_argument("--ranks", default="1,2,4,8,16", metavar="N,N", help="numbers of ranks (1,2,4,8,16)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (5)")
    names = ",".join(CONTENDERS)
    parser.add_argument("--contenders", default=names, metavar="A,B", help=f"who is measured ({names})")
    parser.add_argument("--end", default=",".join(ENDS), metavar="A,B", help=f"end points ({','.join(ENDS)})")
    parser.add_argument("--out", default="bench-launch", metavar="DIR", help="where results go (./bench-launch)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise OptionError(f'--ranks "{text}" is not a list of numbers from 1 on', fix="--ranks 2,8")
    return numbers


def chosen(option: str, text: str, known: Mapping[str, object]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(f'{option}: "{unknown[0]}" is none of {", ".join(known)}', fix=f"{option} {','.join(known)}")
    return names
