"""`phalanx doctor`: checks this machine, or several and the network between them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.cli.options.values import duration
from phalanx.cluster import links
from phalanx.cluster.sources import launchers
from phalanx.cluster.sources.hosts import Host, parse_hostfile, parse_hosts
from phalanx.cluster.sources.surroundings import environment
from phalanx.cluster.sources.task import Allocation, SchedulerTask
from phalanx.contract import error_report
from phalanx.contract.events import LinkMeasured
from phalanx.contract.variables import ERROR_FORMAT
from phalanx.contract.visible import visible
from phalanx.doctor import machine, refusal, report, result
from phalanx.doctor.finding import Finding, worst
from phalanx.doctor.gpu_facts import Gpus
from phalanx.doctor.result import Result
from phalanx.errors import OptionError
from phalanx.launcher.runs import run_folder

_SURVEY = "phalanx.doctor.survey"
_LIMIT = 150.0
_LIMIT_A_NODE = 15.0
_GRACE = 10.0
_RANKS = 8


def main(argv: list[str]) -> int:
    """Run `phalanx doctor`. Return 1 if something would make a run fail."""
    options = make_parser().parse_args(argv)
    environ = environment()
    # Raise an exception, so that the test run ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    patience, quick = _duration(options.join_timeout), options.quick
    hosts = _hosts(options)
    found = launchers.find(environ) if not hosts else None
    result_: Result | None
    if hosts:
        result_ = _over_ssh(hosts, DoctorRun(environ, patience, quick))
    elif isinstance(found, SchedulerTask) and found.placement.world_size > 1:
        result_ = _as_task(found, DoctorRun(environ, patience, quick))
    elif isinstance(found, Allocation) and (len(found.hosts) > 1 or found.here is None):
        # `phalanx run` starts its own srun. On a single node, the test needs two ranks.
        nodes = len(found.hosts)
        result_ = _or_here(DoctorRun(environ, patience, quick).run(["-g", "1" if nodes > 1 else "2"], nodes), environ)
    else:
        result_ = _here(environ, quick)
    if result_ is None:
        return 0
    _keep(result_, environ)
    if options.json:
        sys.stdout.write(json.dumps(report.as_json(result_), indent=1) + "\n")
    else:
        report.show(result_)
    return 1 if worst(result_.findings) == "red" else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx doctor`."""
    parser = argparse.ArgumentParser(
        prog="phalanx doctor",
        description="Check this machine, or several and the network between them: with --hosts, in a Slurm allocation, "
        "or as tasks of srun and mpirun. Prints what is wrong, why, and how to fix it. Exit code 1: something would "
        "make a run fail.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quick", action="store_true", help="skip the test run")
    parser.add_argument(
        "--join-timeout", metavar="TIME", default="60", help="how long to wait for all nodes (default: 60s)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="check these machines, as phalanx run --hosts reaches them")
    where.add_argument("--hostfile", metavar="FILE", help="the same from a file, one host per line")
    return parser


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    try:
        if options.hosts is not None:
            return parse_hosts(options.hosts)
        if options.hostfile is not None:
            with open(options.hostfile) as file:
                return parse_hostfile(file.read())
    except ValueError as why:
        given = f"--hosts {options.hosts}" if options.hosts is not None else f"--hostfile {options.hostfile}"
        raise OptionError(f"{given} cannot be used: {why}", fix="phalanx doctor --hosts a,b") from None
    except OSError as error:
        raise OptionError(
            f"the host file {options.hostfile} cannot be read: {error.strerror}", fix="phalanx doctor --hosts a,b"
        ) from None
    return ()


def _spelled(host: Host) -> str:
    """Return the host with one slot: one rank per node is enough for the test run."""
    user, at, name = host.name.rpartition("@")
    return f"{user}{at}[{name}]:1" if ":" in name and not name.startswith("[") else f"{host.name}:1"


def _duration(text: str) -> float:
    try:
        return duration(text)
    except ValueError as why:
        raise OptionError(
            f"--join-timeout {text} cannot be used: {why}", fix="phalanx doctor --join-timeout 2m …"
        ) from None


def _keep(found: Result, environ: Mapping[str, str]) -> None:
    """Store the measured links. Runs between the same hosts show them."""
    pairs = [pair for pair in found.pairs if not pair.local]
    with contextlib.suppress(OSError):
        links.keep(
            run_folder.home(environ),
            (LinkMeasured(one=p.one, other=p.other, latency=p.latency, there=p.there, back=p.back) for p in pairs),
            time.time(),
        )


# -- test run: where


def _here(environ: Mapping[str, str], quick: bool) -> Result:
    facts = machine.read(environ, run_folder.home(environ))
    alone = Result(nodes=(socket.gethostname(),), machines=tuple(machine.judge(facts)))
    if quick or not facts.versions.torch:
        return alone
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        # The test run has its own home: it is not in the list of runs, and a full disk does not fail it.
        test = DoctorRun({**environ, "PHALANX_HOME": f"{folder}/home"}, 0.0, quick)
        # On this machine only, even if a scheduler has allocated more.
        tried = test.run(["--standalone", "-g", str(_ranks(facts.gpus))], 1)
    return replace(alone, between=tried.between, pairs=tried.pairs, collectives=tried.collectives)


def _ranks(gpus: Gpus) -> int:
    """Return one rank per GPU, but at least two: NCCL needs two to be tested."""
    return min(_RANKS, max(2, len(gpus.gpus) - gpus.hidden))


def _over_ssh(hosts: Sequence[Host], test: DoctorRun) -> Result:
    """Test all hosts. Report those that cannot take part, then test the others without them."""
    refused: list[Finding] = []
    while True:
        began = time.monotonic()
        tried = test.run(["--hosts", ",".join(map(_spelled, hosts))], len(hosts))
        if tried.nodes:
            return replace(tried, between=(*refused, *tried.between))
        refused += tried.between
        out = {finding.node for finding in tried.between}
        left = [host for host in hosts if host.name not in out]
        # A host that timed out waiting for the first one is not to blame, and each such round takes as long again.
        late = time.monotonic() - began > test.patience / 2
        if late or not left or len(left) == len(hosts):
            return _or_here(replace(tried, between=tuple(refused)), test.environ)
        hosts = left


def _as_task(task: SchedulerTask, test: DoctorRun) -> Result | None:
    """Test as one of several tasks. Only the leading task returns a result; the others return None."""
    tried = test.run(["-g", "1"], task.placement.world_size, shared=True)
    return tried if tried.nodes or tried.between else None


def _or_here(tried: Result, environ: Mapping[str, str]) -> Result:
    """Add the checks of this machine if no node answered: they may explain why."""
    if tried.nodes:
        return tried
    facts = machine.read(environ, run_folder.home(environ))
    return replace(tried, nodes=(socket.gethostname(),), machines=tuple(machine.judge(facts)))


# -- test run: how


@dataclass(frozen=True)
class DoctorRun:
    """Runs the survey as `phalanx run` runs any script."""

    environ: Mapping[str, str]
    patience: float  # seconds until all nodes have joined
    quick: bool

    def run(self, where: Sequence[str], nodes: int, *, shared: bool = False) -> Result:
        """Run the survey and return its result, or the reason why it could not run.

        `shared`: other tasks run the same command line, and only one of them gets the result.
        """
        waits = ["--join-timeout", f"{self.patience:g}"] if self.patience else []
        launch = [sys.executable, "-P", "-m", "phalanx", "run", *where, *waits, "--cpu", "--quiet"]
        limit = _LIMIT + _LIMIT_A_NODE * nodes + self.patience
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            outfile = "-" if shared else os.path.join(folder, "result.json")
            # The first node may be another machine, so the result is printed too.
            words = [*launch, "-m", _SURVEY, outfile, "--print", *(["--quick"] if self.quick else [])]
            code, out, err = _run(words, {**self.environ, ERROR_FORMAT: "json"}, limit)
            found = _read(outfile) or result.find(out)
        if found is not None:
            return found
        if shared and code == 0:
            return Result(nodes=())
        text = err.decode(errors="replace").strip()
        if code is not None and (refused := refusal.findings(error_report.find(err))):
            return Result(nodes=(), between=tuple(refused))
        sys.stderr.write(f"{visible(text)}\n" if text else "")
        ended = f"did not end in {limit:.0f} s" if code is None else f"ended with code {code}"
        fact = f"phalanx run could not start the test: it {ended}"
        cause = text.splitlines()[0] if text else ""
        fix = shlex.join([*launch[3:-2], "--no-python", "hostname"])
        return Result(nodes=(), between=(Finding(refusal.CHECK, "red", fact, cause, fix),))


def _read(path: str) -> Result | None:
    try:
        with open(path, "rb") as file:
            return result.decode(file.read())
    except (OSError, ValueError):
        return None


def _run(words: Sequence[str], environ: Mapping[str, str], limit: float) -> tuple[int | None, bytes, bytes]:
    """Run a command and return its exit code and output. The code is None if it ran longer than `limit` seconds."""
    with subprocess.Popen(
        list(words), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            return None, *_end(process)
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End a command and wait for it. It ends its own ranks first."""
    process.terminate()
    try:
        return process.communicate(timeout=_GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        return process.communicate()
