"""`phalanx attach RANK [RUN]`: opens a debugger in one rank of a run, from any of its nodes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Iterator

from phalanx.cli import run_lookup
from phalanx.contract.visible import visible, visible_line
from phalanx.errors import LaunchError, UsageError
from phalanx.forkserver.debug.terminal import LEAVE
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import AttachedReply, AttachQuery, QueryRefused
from phalanx.launcher.runs.run_folder import RunRecord

_PORT = 5678  # the default of IDEs
_PROMPTS = re.compile(rb"(?m)^(\(Pdb\) )+")

_WORDS = {
    "breakpoint": "rank {rank} is at its breakpoint, {place}: c continues, q ends it, Ctrl-D leaves it waiting",
    "stopped": "rank {rank} is stopped: c or q continues",
    "looking": "rank {rank} is in native code (probably a collective) and was not stopped: inspect it, then q",
}
_TEXT = (
    "Open a debugger (pdb) in one rank of a run. The rank stops, and continues when you leave (q, Ctrl-D). "
    "A rank at a breakpoint() stays there until you continue it (c)."
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx attach`."""
    parser = argparse.ArgumentParser(prog="phalanx attach", description=_TEXT)
    parser.add_argument("rank", type=int, metavar="RANK", help="global rank")
    parser.add_argument("run", nargs="?", help="name from `phalanx ps`, or a prefix of it")
    parser.add_argument(
        "-c",
        "--command",
        action="append",
        metavar="TEXT",
        help="run this debugger command, print the result, and leave; repeatable",
    )
    parser.add_argument(
        "--debugpy",
        nargs="?",
        type=int,
        const=_PORT,
        metavar="PORT",
        help=f"for an IDE: debugpy listens on this port of the rank's machine (default: {_PORT}; 0: a free port)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx attach`. Return the exit code."""
    options = make_parser().parse_args(argv)
    run = _find(options.run, options.rank)
    with _asked(run, options.rank, options.debugpy) as (caller, answer, stream):
        if stream is None:
            where = f"127.0.0.1:{answer.port} on {visible_line(answer.host)}"
            sys.stdout.write(
                f"rank {options.rank} waits for an IDE at {where}; the run continues, without time limits\n"
                "debugpy has no password: every user of that machine can connect, and run code as you\n"
            )
            return 0
        if options.command:
            return _type(stream, options.command)
        text = _WORDS[answer.how].format(rank=options.rank, place=answer.place)
        sys.stderr.write(f"phalanx: {visible(text)}\n")
        return _talk(caller, stream, leaves=answer.how == "breakpoint")


@contextlib.contextmanager
def _asked(
    run: RunRecord, rank: int, port: int | None
) -> Iterator[tuple[socket.socket, AttachedReply, socket.socket | None]]:
    """Yield the connection to the agent, the agent's answer, and the terminal of the debugger."""
    with control_socket.call(run, AttachQuery(rank=rank, port=port, pid=os.getpid())) as caller:
        try:
            answer, fds = control_socket.receive(caller)
        except ConnectionResetError:
            raise LaunchError(f"{run.id} has ended", fix="phalanx ps --all") from None
        if isinstance(answer, QueryRefused):
            raise LaunchError(answer.why, fix=answer.fix)
        if not isinstance(answer, AttachedReply):
            raise LaunchError(f"unexpected reply of {run.id}: {type(answer).__name__}")
        if not fds:
            yield caller, answer, None
            return
        with socket.socket(fileno=fds[0]) as stream:
            yield caller, answer, stream


def _type(stream: socket.socket, commands: list[str]) -> int:
    stream.sendall("".join(f"{command}\n" for command in commands).encode())
    stream.shutdown(socket.SHUT_WR)  # the debugger exits at the end of its input
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := stream.recv(1 << 16):
            found += data
    sys.stdout.buffer.write(_PROMPTS.sub(b"", bytes(found)).removesuffix(b"(Pdb) "))
    sys.stdout.buffer.flush()
    return 0


def _talk(caller: socket.socket, stream: socket.socket, *, leaves: bool) -> int:
    """Connect the terminal to the debugger until either ends. Ctrl-C goes to the debugger."""
    unanswered = 0  # Ctrl-C presses without an answer

    def interrupt(*_: object) -> None:
        nonlocal unanswered
        unanswered += 1
        if unanswered > 2:
            raise _Interrupted
        if unanswered > 1:
            sys.stderr.write("phalanx: no answer: the rank is in native code, or stopped; Ctrl-C again leaves it\n")
        with contextlib.suppress(OSError):
            caller.send(b"\x03")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        inputs: list[int] = [stream.fileno(), 0]
        while True:
            ready, _, _ = select.select(inputs, [], [])
            if stream.fileno() in ready:
                data = _received(stream)
                if not data:
                    return 0
                unanswered = 0
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            elif 0 in ready:
                typed = os.read(0, 1 << 16)
                if not typed and (leaves or not os.isatty(0)):
                    stream.shutdown(socket.SHUT_WR)
                    inputs.remove(0)
                else:
                    stream.sendall(typed or LEAVE.encode())
    except BrokenPipeError:
        return 0
    except _Interrupted:
        return 130
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupted(Exception):  # noqa: N818 - as with KeyboardInterrupt
    pass


def _received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1 << 16)
    except ConnectionResetError:
        return b""


def _find(name: str | None, rank: int) -> RunRecord:
    verb = f"attach {rank}"
    run = run_lookup.find_running(None, verb=verb) if name is None else run_lookup.find(name, verb=verb)
    if run.alive:
        return run
    if run.ended is None and not run.here:
        raise UsageError(f"{run.id} runs on {run.host}", fix=f"on {run.host}: phalanx {verb} {run.id}")
    raise UsageError(f"{run.id} has ended", fix=f"phalanx why {run.id}")
