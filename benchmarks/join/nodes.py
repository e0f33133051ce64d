"""The processes of `phalanx bench join`: a real leader, and real members without workers.

    python -m benchmarks.join.nodes leader | members

Requests arrive as lines of JSON on standard input, answers go to standard output. Times are from the monotonic clock,
which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
import time
from typing import Any

from phalanx.control import messages
from phalanx.control.endpoint import Endpoint
from phalanx.control.leader.leader import Leader
from phalanx.control.leader.members import Members
from phalanx.control.leader.roster import Roster
from phalanx.control.member.member import Member
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

TIMEOUT = 120.0
HOST = "127.0.0.1"


class EventRecorder:
    """Shows nothing, and records errors."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.losses: list[str] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Record a message."""
        self.notes.append(text)

    def waiting(self, text: str) -> None:
        """Ignore the progress of the rendezvous."""


class LeaderRecorder(EventRecorder):
    """The events of the leader."""

    def member_joined(self, member: int) -> None:
        """Ignore a member that has joined."""

    def rendezvous_progress(self, joined: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        """Ignore the progress of the rendezvous."""

    def message_received(self, member: int, message: messages.FromMember) -> None:
        """Ignore a message."""

    def member_lost(self, member: int, why: str, *, silent: bool) -> None:  # noqa: ARG002
        """Record the loss of a member."""
        self.losses.append(f"node {member}: {why}")


class MemberRecorder(EventRecorder):
    """The events of a member."""

    def message_received(self, message: messages.FromLeader) -> None:
        """Record the end of the run."""
        if isinstance(message, messages.EndMessage):
            self.ended.set()

    def leader_lost(self, why: str, *, silent: bool) -> None:  # noqa: ARG002
        """Record the loss of the leader."""
        self.losses.append(why)
        self.ended.set()


def node_info(member: int | None) -> messages.NodeInfo:
    """Return the description of a node, as large as a real one."""
    versions = {"phalanx": "0.1.0", "python": "3.11.9", "torch": "2.11.0", "nccl": "2.27.5", "cuda": "12.8"}
    terms = {"nodes": "4096", "workers": "8", "script": "/home/someone/project/train.py", "arguments": "1f0c3a5e"}
    host = f"node{member or 0:05d}.cluster.example"
    return messages.NodeInfo(run="bench", member=member, host=host, pid=4321, slots=8, versions=versions, terms=terms)


async def lead() -> None:
    """Run the leader until all members have joined, then end them."""
    request = _read()
    token, members = Token(bytes.fromhex(request["token"]), "bench"), Members(Roster(int(request["members"]) + 1))
    recorder = LeaderRecorder()
    leader = Leader(token, node_info(0), members, run="bench", events=recorder)
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        before = _memory("VmRSS")
        await leader.open([sock])
        _answer(port=sock.getsockname()[1])
        try:
            await leader.wait_for_members(TIMEOUT)
            failure = ""
        except JoinError as error:
            failure = str(error).partition("\n")[0]
        at, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        _answer(
            complete=at,
            cpu=usage.ru_utime + usage.ru_stime,
            memory=_memory("VmHWM") - before,
            notes=len(recorder.notes),
            failure=failure,
        )
        await _wait_for_line()
        members.broadcast(messages.EndMessage(code=0))
        await leader.close()
    _answer(lost=recorder.losses)


async def follow() -> None:
    """Run the members that standard input names, in one process."""
    # 4,096 connections exceed the usual limit of open files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    request = _read()
    token, where = Token(bytes.fromhex(request["token"]), "bench"), [Endpoint(HOST, int(request["port"]))]
    recorders = [MemberRecorder() for _ in request["ids"]]
    members = [
        Member(token, node_info(id_), lambda: where, events=recorder)
        for id_, recorder in zip(request["ids"], recorders, strict=True)
    ]
    _answer(ready=True)
    await _wait_for_line()
    start = time.monotonic()
    results = await asyncio.gather(*(member.join(TIMEOUT) for member in members), return_exceptions=True)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    failures = [str(result).partition("\n")[0] for result in results if isinstance(result, BaseException)]
    _answer(start=start, joined=time.monotonic(), cpu=usage.ru_utime + usage.ru_stime, failures=failures[:5])
    await asyncio.gather(*(recorder.ended.wait() for recorder in recorders))
    await asyncio.gather(*(member.leave() for member in members))
    _answer(lost=[why for recorder in recorders for why in recorder.losses][:5])


def _memory(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def _read() -> dict[str, Any]:
    request: dict[str, Any] = json.loads(sys.stdin.readline() or sys.exit("standard input is closed"))
    return request


async def _wait_for_line() -> None:
    """Wait for the next line of standard input, or its end."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def _answer(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run({"leader": lead, "members": follow}[sys.argv[1]]())
