"""`phalanx why [RUN]`: explains what a running job waits for, or why an ended one failed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from phalanx.cli import run_lookup
from phalanx.contract import encoding, events
from phalanx.contract.exit_codes import stopped_by
from phalanx.contract.visible import visible
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.evidence import stall_dump
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import (
    AnyQuery,
    AnyReply,
    QueryRefused,
    TimingsQuery,
    TimingsReply,
    WhyQuery,
    WhyReply,
)
from phalanx.launcher.runs import postmortem
from phalanx.launcher.runs.run_folder import RunRecord

_TIMEOUT = 20.0  # seconds for all nodes to answer

R = TypeVar("R", bound=AnyReply)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx why`."""
    parser = argparse.ArgumentParser(
        prog="phalanx why",
        description="Say which rank is wrong, at which line and why: of a running job, or of one that has ended.",
        epilog="exit code: 1 if the run is stalled, has failed or was killed; 0 if nothing is wrong, also if it was "
        "stopped or preempted",
    )
    parser.add_argument("run", nargs="?", help="name from `phalanx ps`, or a prefix of it (default: the last run)")
    outside = parser.add_mutually_exclusive_group()
    outside.add_argument(
        "--pid",
        type=int,
        nargs="+",
        metavar="PID",
        help="a job that phalanx did not start: pid of its launcher, or of its ranks",
    )
    outside.add_argument("--slurm", metavar="JOB", help="the same, by Slurm job id")
    parser.add_argument("--here", action="store_true", help="with --slurm: only this node")
    # Used between the nodes of a Slurm job.
    parser.add_argument("--encoded-evidence", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stacks", action="store_true", help="of a running job: also print all stacks of all ranks")
    parser.add_argument(
        "--timings", action="store_true", help="of a running job: also print how long each rank has computed and waited"
    )
    parser.add_argument("--json", action="store_true", help="print verdicts and evidence as one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx why`. Return 0 if nothing is wrong with the run, else 1."""
    options = make_parser().parse_args(argv)
    if options.pid or options.slurm:
        if options.run:
            raise UsageError(f"{options.run} and --pid or --slurm are two different jobs", fix="leave one of them out")
        from phalanx.launcher.remote import foreign_job

        here = options.here or options.encoded_evidence
        looked = foreign_job.of_job(options.slurm, here=here) if options.slurm else foreign_job.below(options.pid)
        if options.encoded_evidence:
            sys.stdout.write(foreign_job.encode_lines(looked))
            return 0
        answer = foreign_job.answer(looked)
    else:
        run = run_lookup.find(options.run, verb="why")
        if not run.alive:
            return _ended(run, as_json=options.json)
        answer = _ask(run, WhyQuery(), WhyReply)
        if options.timings:
            timings = _ask(run, TimingsQuery(), TimingsReply)
            lines = [*timings.late, *(timings.table or ["no steps so far"])]
            answer = replace(answer, report="\n".join([answer.report, "", *lines]))
    if options.json:
        found = {"verdicts": answer.verdicts, "evidence": answer.evidence}
        sys.stdout.write(json.dumps(encoding.valid(msgspec.to_builtins(found, str_keys=True))) + "\n")
    else:
        sys.stdout.write(visible(answer.report) + "\n")
        if options.stacks:
            sys.stdout.write("\n" + visible(stall_dump.text(answer.evidence)))
    return 1 if answer.verdicts else 0


def _ask(run: RunRecord, query: AnyQuery, kind: type[R]) -> R:
    try:
        reply = control_socket.request(run, query, kind, timeout=_TIMEOUT)
    except TimeoutError:
        reply = QueryRefused(why="its agent does not answer")
    except ConnectionResetError:
        raise LaunchError(f"{run.id} ended before it answered", fix=f"phalanx why {run.id}") from None
    if isinstance(reply, QueryRefused):
        notes = [event.text for event in postmortem.read(run).history if isinstance(event, events.NoteEvent)]
        raise LaunchError(
            f"{run.id} cannot be asked: {reply.why}",
            details=[f"its last message: {note}" for note in notes[-1:]],
            fix=f"phalanx why {run.id}, in a moment"
            if reply.why == control_socket.NOT_STARTED
            else f"phalanx why --pid {run.pid}",
        )
    return reply


def _ended(run: RunRecord, *, as_json: bool) -> int:
    remains = postmortem.read(run)
    if as_json:
        found = {
            "run": run.id,
            "state": run.state,
            "code": run.code,
            "first": postmortem.first(remains),
            "verdicts": msgspec.to_builtins(remains.verdicts),
            "events": [msgspec.to_builtins(event) for event in remains.history],
        }
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(visible(postmortem.report(remains)) + "\n")
    return 0 if run.code == 0 or run.preempted or stopped_by(run.code) else 1
