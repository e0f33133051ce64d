"""The processes that `phalanx bench join` measures: a real leader, and members that are real but for their workers.

    python -m phalanx.bench.crowd leader | members

What they are told comes as lines of JSON on standard input; what they saw goes out in the same way. Times are those of
the monotonic clock, which all processes of a machine share.
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
from phalanx.control.leader import Leader
from phalanx.control.member import Endpoint, Member
from phalanx.control.tokens import Token
from phalanx.errors import JoinError

TIMEOUT = 120.0
HOST = "127.0.0.1"


class Quiet:
    """Nothing is to be shown, but what goes wrong is counted."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.lost_ones: list[str] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def waiting(self, text: str) -> None: ...


class LeaderEars(Quiet):
    def joined(self, member: int) -> None: ...
    def gathering(self, here: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None: ...

    def heard(self, member: int, message: messages.FromMember) -> None: ...

    def lost(self, member: int, why: str, *, silent: bool) -> None:  # noqa: ARG002
        self.lost_ones.append(f"node {member}: {why}")


class MemberEars(Quiet):
    def heard(self, message: messages.FromLeader) -> None:
        if isinstance(message, messages.EndMessage):
            self.ended.set()

    def lost(self, why: str, *, silent: bool) -> None:  # noqa: ARG002
        self.lost_ones.append(why)
        self.ended.set()


def arrival(member: int | None) -> messages.NodeInfo:
    """As large as a real one."""
    versions = {"phalanx": "0.1.0", "python": "3.11.9", "torch": "2.11.0", "nccl": "2.27.5", "cuda": "12.8"}
    terms = {"nodes": "4096", "workers": "8", "script": "/home/someone/project/train.py", "arguments": "1f0c3a5e"}
    host = f"node{member or 0:05d}.cluster.example"
    return messages.NodeInfo(run="bench", member=member, host=host, pid=4321, slots=8, versions=versions, terms=terms)


async def lead() -> None:
    told = _hear()
    token, members = Token(bytes.fromhex(told["token"]), "bench"), int(told["members"])
    ears = LeaderEars()
    leader = Leader(token, arrival(0), expected=members + 1, run="bench", events=ears)
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        before = _memory("VmRSS")
        await leader.open([sock])
        _say(port=sock.getsockname()[1])
        try:
            await leader.wait_for_members(TIMEOUT)
            failure = ""
        except JoinError as error:
            failure = str(error).partition("\n")[0]
        at, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        _say(
            complete=at,
            cpu=usage.ru_utime + usage.ru_stime,
            memory=_memory("VmHWM") - before,
            notes=len(ears.notes),
            failure=failure,
        )
        await _told()
        leader.broadcast(messages.EndMessage(code=0))
        await leader.close()
    _say(lost=ears.lost_ones)


async def follow() -> None:
    # 4,096 connections are more files than the usual limit lets a process have.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    told = _hear()
    token, where = Token(bytes.fromhex(told["token"]), "bench"), [Endpoint(HOST, int(told["port"]))]
    ears = [MemberEars() for _ in told["ids"]]
    members = [
        Member(token, arrival(id_), lambda: where, events=ear) for id_, ear in zip(told["ids"], ears, strict=True)
    ]
    _say(ready=True)
    await _told()
    start = time.monotonic()
    results = await asyncio.gather(*(member.join(TIMEOUT) for member in members), return_exceptions=True)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    failures = [str(result).partition("\n")[0] for result in results if isinstance(result, BaseException)]
    _say(start=start, joined=time.monotonic(), cpu=usage.ru_utime + usage.ru_stime, failures=failures[:5])
    await asyncio.gather(*(ear.ended.wait() for ear in ears))
    await asyncio.gather(*(member.leave() for member in members))
    _say(lost=[why for ear in ears for why in ear.lost_ones][:5])


def _memory(name: str) -> int:
    """Bytes, of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def _hear() -> dict[str, Any]:
    heard: dict[str, Any] = json.loads(sys.stdin.readline() or sys.exit("nobody is there to say what to do"))
    return heard


async def _told() -> None:
    """A line has come, or the end."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run({"leader": lead, "members": follow}[sys.argv[1]]())
