"""A job that phalanx did not start, looked at from outside: what the kernel says, and py-spy where it may.

Nothing in such a job was prepared: there is no page, no flight recorder that answers, and stacks only by py-spy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from phalanx.diagnose import diagnosis, frames, report
from phalanx.diagnose.evidence import CallEvidence, Evidence, NodeFacts, Rank, decode, encode
from phalanx.diagnose.rank_state import PATIENCE, RESTS
from phalanx.errors import LaunchError
from phalanx.forkserver import linux
from phalanx.launch.hangs import stacks
from phalanx.launch.hangs.source_lines import Sources
from phalanx.launch.remote import foreign_processes
from phalanx.launch.remote.foreign_processes import ForeignProcess
from phalanx.launch.telemetry import process_stats

_APART = 1.0  # seconds between the two looks that a rate is made of
_SPY = 10.0  # seconds for py-spy, a rank
_STILL = PATIENCE  # for how long a rank that does nothing is taken to have done so: nobody has watched
_PIECE = 1000  # letters a line
_ELSEWHERE = 60.0  # seconds for the other nodes of a job
MORE = (
    "phalanx run starts it so that more can be seen: collectives, their numbers and shapes, whoever holds Python's lock"
)


def below(pids: Sequence[int]) -> Evidence:
    """Of the ranks among these processes and all that they have started."""
    return asyncio.run(_look(foreign_processes.below(pids)))


def of_job(job: str, *, here: bool) -> Evidence:
    """Of a Slurm job: on this node, or on all of its nodes, each asked where it is."""
    if here:
        return below(foreign_processes.of_job(job))
    nodes = foreign_processes.nodes_of(job)
    if nodes == [os.uname().nodename]:
        return below(foreign_processes.of_job(job))
    program = shutil.which("srun") or "srun"
    asked = [sys.executable, "-m", "phalanx", "why", "--slurm", job, "--parcel"]
    words = [program, f"--jobid={job}", "--overlap", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--input=none"]
    try:
        done = subprocess.run([*words, *asked], capture_output=True, text=True, timeout=_ELSEWHERE, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the nodes of job {job} do not answer", fix=f"phalanx why --slurm {job} --here, on one"
        ) from None
    found = opened(done.stdout)
    if not found:
        said = (done.stderr.strip() or "srun said nothing").splitlines()[-3:]
        raise LaunchError(
            f"job {job} cannot be looked at", details=said, fix=f"phalanx why --slurm {job} --here, on a node"
        )
    return _together(found)


def parcel(evidence: Evidence) -> str:
    """For srun, which mixes the lines of its tasks, and breaks long ones."""
    text, host = base64.b64encode(encode(evidence)).decode(), os.uname().nodename
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return "".join(f"parcel {host} {number} {piece}\n" for number, piece in enumerate(pieces))


def opened(output: str) -> list[Evidence]:
    """Of every host whose parcel is whole."""
    parcels: dict[str, dict[int, str]] = {}
    for line in output.splitlines():
        match line.split():
            case ["parcel", host, number, piece]:
                parcels.setdefault(host, {})[int(number)] = piece
    found = []
    for pieces in parcels.values():
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            found.append(decode(base64.b64decode("".join(pieces[number] for number in sorted(pieces)))))
    return found


def _together(found: list[Evidence]) -> Evidence:
    """Nodes are numbered in the order of their lowest ranks."""
    found = sorted(found, key=lambda each: min((rank.rank for rank in each.ranks), default=0))
    ranks = [replace(rank, node=node) for node, each in enumerate(found) for rank in each.ranks]
    nodes = [replace(one, node=node) for node, each in enumerate(found) for one in each.nodes]
    return replace(found[0], ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)), nodes=tuple(nodes))


async def _look(found: list[ForeignProcess]) -> Evidence:
    rates = process_stats.ProcessStatsReader()
    for one in found:
        rates.pulse(one.pid)
    await asyncio.sleep(_APART)
    below_them = await asyncio.to_thread(linux.families, [one.pid for one in found])
    ranks = await asyncio.gather(*(_rank(one, rates, below_them.get(one.pid, [])) for one in found))
    total, available = process_stats.machine()
    node = NodeFacts(node=0, host=os.uname().nodename, memory=total, available=available, swapping=rates.swapping())
    source = Sources()
    return Evidence(
        time=time.time(),
        waited=0.0,  # nobody has watched
        ranks=tuple(map(source.annotated, ranks)),
        nodes=(node,),
        world_size=max((one.world_size for one in found), default=0),
    )


async def _rank(one: ForeignProcess, rates: process_stats.ProcessStatsReader, below_it: list[int]) -> Rank:
    pulse = rates.pulse(one.pid)
    process = await asyncio.to_thread(process_stats.look, one.pid, pulse, below_it)
    threads, note = await stacks.spied(one.pid, native=False, limit=_SPY)
    rank = Rank(rank=one.rank, node=0, process=process, threads=threads, note=note)
    if process.state != "S" or process.cpu > RESTS:
        return rank
    # A backward pass that does nothing waits for others, in a collective that nobody has recorded.
    waits = frames.in_backward(frames.main_frames(rank))
    return replace(rank, since=_STILL, calls=(CallEvidence(group="", seq=0, op="a collective"),) if waits else ())


def answer(evidence: Evidence) -> dict[str, Any]:
    """As an agent gives it."""
    verdicts = diagnosis.diagnose(evidence)
    return {
        "verdicts": msgspec.to_builtins(verdicts),
        "evidence": json.loads(encode(evidence)),
        "report": report.text(evidence, verdicts, more=MORE),
    }
