"""`phalanx doctor`: what is wrong with this machine, or with several and the network between them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.cluster.sources import launchers
from phalanx.cluster.sources.hosts import Host, parse_hostfile, parse_hosts
from phalanx.cluster.sources.surroundings import environment
from phalanx.cluster.sources.task import Allocation
from phalanx.doctor import machine, report, result
from phalanx.doctor.finding import Finding, worst
from phalanx.doctor.gpus import Gpus
from phalanx.doctor.result import Result
from phalanx.errors import OptionError
from phalanx.launch import runfolder

_SURVEY = "phalanx.doctor.survey"
_LIMIT = 150.0
_LIMIT_A_NODE = 15.0
_GRACE = 10.0
_RANKS = 8


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    environ = environment()
    # As an exception, so that the test run is ended with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hosts = _hosts(options)
    found = launchers.find(environ) if not hosts else None
    if hosts:
        result_ = _across(["--hosts", ",".join(map(_spelled, hosts))], len(hosts), environ, options.quick)
    elif isinstance(found, Allocation) and len(found.hosts) > 1:
        result_ = _across([], len(found.hosts), environ, options.quick, starter=_srun(len(found.hosts)))
    else:
        result_ = _here(environ, options.quick)
    if options.json:
        sys.stdout.write(json.dumps(report.as_json(result_), indent=1) + "\n")
    else:
        report.show(result_)
    return 1 if worst(result_.findings) == "red" else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx doctor",
        description="Checks this machine, or with --hosts or in a Slurm allocation several and the network between "
        "them. Says what is wrong, why, and what to type. Exit code 1: something would make a run fail.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quick", action="store_true", help="only look, measure nothing")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="check these machines, as phalanx run --hosts reaches them")
    where.add_argument("--hostfile", metavar="FILE", help="the same from a file, a host a line")
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
    """With one slot: a rank a node is enough to look around."""
    user, at, name = host.name.rpartition("@")
    return f"{user}{at}[{name}]:1" if ":" in name and not name.startswith("[") else f"{host.name}:1"


def _srun(nodes: int) -> list[str]:
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]


def _here(environ: Mapping[str, str], quick: bool) -> Result:
    facts = machine.read(environ, runfolder.home(environ))
    alone = Result(nodes=(socket.gethostname(),), machines=tuple(machine.judge(facts)))
    if quick or not facts.versions.torch:
        return alone
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        # A home of its own: the test shall not stand in the list of runs, nor fail for want of a disk.
        tried = _survey(
            # On this machine alone, whatever a scheduler says about others.
            ["--standalone", "-g", str(_ranks(facts.gpus))],
            folder,
            {**environ, "PHALANX_HOME": f"{folder}/home"},
            limit=_LIMIT,
        )
    return replace(alone, between=tried.between, pairs=tried.pairs, collectives=tried.collectives)


def _ranks(gpus: Gpus) -> int:
    """Two at least, or there is nothing to see; one a GPU, so that NCCL is tried."""
    return min(_RANKS, max(2, len(gpus.gpus) - gpus.hidden))


def _across(
    where: Sequence[str], nodes: int, environ: Mapping[str, str], quick: bool, starter: Sequence[str] = ()
) -> Result:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        words = [*where] if where else ["-g", "1"]
        limit = _LIMIT + _LIMIT_A_NODE * nodes
        tried = _survey(words, folder, environ, limit=limit, starter=starter, quick=quick)
    if tried.nodes:
        return tried
    # Nobody answered. What is wrong here may be why.
    facts = machine.read(environ, runfolder.home(environ))
    return replace(tried, nodes=(socket.gethostname(),), machines=tuple(machine.judge(facts)))


def _survey(
    where: Sequence[str],
    folder: str,
    environ: Mapping[str, str],
    *,
    limit: float,
    starter: Sequence[str] = (),
    quick: bool = False,
) -> Result:
    """Run the survey as any script is run. The first node may be another machine, so the result is printed too."""
    outfile = os.path.join(folder, "result.json")
    launch = [*starter, sys.executable, "-m", "phalanx", "run", *where, "--cpu", "--quiet"]
    words = [*launch, "-m", _SURVEY, outfile, "--print", *(["--quick"] if quick else [])]
    code, out, err = _run(words, environ, limit)
    found = _read(outfile) or result.find(out)
    if found is not None:
        return found
    text = err.decode(errors="replace").strip()
    sys.stderr.write(f"{text}\n" if text else "")
    ended = f"did not end in {limit:.0f} s" if code is None else f"ended with code {code}"
    return Result(
        nodes=(),
        between=(
            Finding(
                "test run",
                "red",
                f"phalanx run could not start the test: it {ended}",
                text.splitlines()[0] if text else "",
                shlex.join(["phalanx", *launch[len(starter) + 3 : -2], "--no-python", "hostname"]),
            ),
        ),
    )


def _read(path: str) -> Result | None:
    try:
        with open(path, "rb") as file:
            return result.decode(file.read())
    except (OSError, ValueError):
        return None


def _run(words: Sequence[str], environ: Mapping[str, str], limit: float) -> tuple[int | None, bytes, bytes]:
    """To its end, or to that of our patience (code None)."""
    with subprocess.Popen(
        list(words), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                out, err = process.communicate(timeout=_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            return None, out, err
        except BaseException:
            process.terminate()  # it ends its ranks
            raise
