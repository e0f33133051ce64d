"""Evidence of a job that phalanx did not start: from the kernel, and from py-spy where permitted.

Such a job has no probe and no flight recorder that answers, and its stacks come from py-spy only.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from phalanx.diagnose import diagnosis, frames, report
from phalanx.diagnose.evidence import CallEvidence, Evidence, NodeFacts, Rank, decode, encode
from phalanx.diagnose.rank_state import PATIENCE, RESTS
from phalanx.errors import LaunchError
from phalanx.forkserver import linux
from phalanx.launcher.evidence import stacks
from phalanx.launcher.evidence.source_lines import Sources
from phalanx.launcher.ipc.control_messages import WhyReply
from phalanx.launcher.remote import foreign_processes
from phalanx.launcher.remote.foreign_processes import ForeignProcess
from phalanx.launcher.telemetry import process_stats

_RATE_INTERVAL = 1.0  # seconds between the two readings for a rate
_SPY = 10.0  # seconds for py-spy, per rank
_IDLE = PATIENCE  # seconds for which an idle rank is assumed to be idle, because it was not watched before
_PIECE = 700  # characters per line, which srun breaks after 1,024: the name of a host may have 253
_MARK = "phalanx-evidence"  # before each piece, the name of the host and the number of the piece
_SRUN_TIMEOUT = 60.0  # seconds for the other nodes of a job
MORE = "started with phalanx run, more would be known: collectives, their numbers and shapes, who holds the GIL"


def below(pids: Sequence[int]) -> Evidence:
    """Gather the evidence of the ranks among these processes and their descendants."""
    return asyncio.run(_gather(foreign_processes.below(pids)))


def of_job(job: str, *, here: bool) -> Evidence:
    """Gather the evidence of a Slurm job, on this node or on all its nodes."""
    if here:
        return below(foreign_processes.of_job(job))
    nodes = foreign_processes.nodes_of(job)
    if nodes == [os.uname().nodename]:
        return below(foreign_processes.of_job(job))
    program = shutil.which("srun") or "srun"
    asked = [sys.executable, "-P", "-m", "phalanx", "why", "--slurm", job, "--encoded-evidence"]
    words = [program, f"--jobid={job}", "--overlap", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--input=none"]
    try:
        done = subprocess.run([*words, *asked], capture_output=True, text=True, timeout=_SRUN_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the nodes of job {job} do not answer", fix=f"phalanx why --slurm {job} --here, on one"
        ) from None
    found = decode_lines(done.stdout)
    if not found:
        output = (done.stderr.strip() or "srun printed nothing").splitlines()[-3:]
        raise LaunchError(
            f"job {job} cannot be examined", details=output, fix=f"phalanx why --slurm {job} --here, on a node"
        )
    return _together(found)


def encode_lines(evidence: Evidence) -> str:
    """Encode evidence for srun, which mixes the lines of its tasks and breaks long ones."""
    text, host = base64.b64encode(encode(evidence)).decode(), os.uname().nodename
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return "".join(f"{_MARK} {host} {number} {piece}\n" for number, piece in enumerate(pieces))


def decode_lines(output: str) -> list[Evidence]:
    """Decode the evidence of every host whose lines are complete."""
    hosts: dict[str, dict[int, str]] = {}
    for line in output.splitlines():
        match line.split():
            case [mark, host, number, piece] if mark == _MARK and number.isdecimal():
                hosts.setdefault(host, {})[int(number)] = piece
    found = []
    for pieces in hosts.values():
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            found.append(decode(base64.b64decode("".join(pieces[number] for number in sorted(pieces)))))
    return found


def _together(found: list[Evidence]) -> Evidence:
    """Combine the evidence of several nodes, numbered by their lowest rank."""
    found = sorted(found, key=lambda each: min((rank.rank for rank in each.ranks), default=0))
    ranks = [replace(rank, node=node) for node, each in enumerate(found) for rank in each.ranks]
    nodes = [replace(one, node=node) for node, each in enumerate(found) for one in each.nodes]
    return replace(found[0], ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)), nodes=tuple(nodes))


async def _gather(found: list[ForeignProcess]) -> Evidence:
    rates = process_stats.ProcessStatsReader()
    for one in found:
        rates.read(one.pid)
    await asyncio.sleep(_RATE_INTERVAL)
    below_them = await asyncio.to_thread(linux.families, [one.pid for one in found])
    ranks = await asyncio.gather(*(_rank(one, rates, below_them.get(one.pid, [])) for one in found))
    total, available = process_stats.host_memory()
    node = NodeFacts(node=0, host=os.uname().nodename, memory=total, available=available, swapping=rates.swapping())
    source = Sources()
    return Evidence(
        time=time.time(),
        waited=0.0,  # unknown
        ranks=tuple(map(source.annotated, ranks)),
        nodes=(node,),
        world_size=max((one.world_size for one in found), default=0),
    )


async def _rank(one: ForeignProcess, rates: process_stats.ProcessStatsReader, below_it: list[int]) -> Rank:
    stats = rates.read(one.pid)
    process = await asyncio.to_thread(process_stats.describe, one.pid, stats, below_it)
    threads, note = await stacks.spied(one.pid, native=False, limit=_SPY)
    rank = Rank(rank=one.rank, node=0, process=process, threads=threads, note=note)
    if process.state != "S" or process.cpu > RESTS:
        return rank
    # An idle backward pass waits for others, in a collective that is not recorded.
    waits = frames.in_backward(frames.main_frames(rank))
    return replace(rank, since=_IDLE, calls=(CallEvidence(group="", seq=0, op="a collective"),) if waits else ())


def answer(evidence: Evidence) -> WhyReply:
    """Return the answer that an agent would give to `phalanx why`."""
    verdicts = diagnosis.diagnose(evidence)
    return WhyReply(evidence=evidence, verdicts=tuple(verdicts), report=report.text(evidence, verdicts, more=MORE))
