"""Frames of the control port and of the sockets between agents, workers and viewers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from phalanx.contract.messages import snapshot_messages, worker_messages
from phalanx.contract.ranks.placement import PartialPlacement, RankPlacement
from phalanx.control import messages
from phalanx.control.leader.admission import Admission, Applicant, describe
from phalanx.control.leader.roster import Roster
from phalanx.control.tokens import Token
from phalanx.launcher.ipc import control_messages
from tests.fuzz.campaign import Check
from tests.fuzz.mutation import altered, mutated

KEY = b"k" * 32
PLACEMENT = RankPlacement(rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, node_count=1)
INFO = messages.NodeInfo(
    run="r",
    member=1,
    host="host1",
    pid=7,
    slots=2,
    versions={"torch": "2.9"},
    terms={"script": "abc"},
    claim=PartialPlacement(rank=1, world_size=2),
)
RANKS = messages.StartRanks(placements=(PLACEMENT,), topology="0-1", store_port=1)
VALID: tuple[messages.Message, ...] = (
    INFO,
    messages.JoinRequest(protocol=messages.PROTOCOL, info=messages.encode(INFO)),
    messages.ResumeRequest(member=1, session=b"s" * 32, received=3),
    messages.Welcome(member=1, run="r", leader="host0", node_timeout=15.0, notes=("a",)),
    messages.Refusal(kind="run", leader="a", member="b"),
    messages.Start(attempt=1, place=RANKS),
    messages.Regroup(attempt=1, generation=2, why="x", place=RANKS),
    messages.PeerList(
        leader=0,
        successors=(messages.Peer(member=1, host="h", address="10.0.0.1", port=1),),
        working=((1, 1),),
        spares=((3, 9),),
    ),
    messages.RankLeft(attempt=1),
    messages.Stop(signal=15, reason="x", grace=1.0),
    messages.NodeWorkerFailed(rank=1, reason="x", time=1.0, step=3),
    messages.Log(rank=1, stream=2, data=b"x" * 40),
    messages.AttemptEnded(attempt=1, exited=(messages.CleanExitReport(rank=1, time=1.0, in_training=True),)),
    messages.AttemptEnded(attempt=1, first=messages.FailureReport(rank=1, code=-9, time=1.0, stderr=("a", "b"))),
    messages.RpcFrame(kind="why", number=3, content=b"{}"),
    messages.Leaving(code=1, text="x"),
)
DECODERS: tuple[Any, ...] = (
    *(messages.request, messages.node_info, messages.answer, messages.from_leader, messages.from_member),
    *(worker_messages.from_worker, worker_messages.from_agent, snapshot_messages.question, snapshot_messages.answer),
    *(value for value in vars(control_messages).values() if type(value).__name__ == "Decoder"),
)


@contextlib.contextmanager
def opened() -> Iterator[Check]:
    """Yield the check of one frame."""
    yield check


def check(chance: random.Random, note: Callable[[object], None]) -> None:
    """Decode a frame with every decoder, and have its sender admitted."""
    message = chance.choice(VALID)
    if chance.random() < 0.5:
        content = mutated(messages.encode(message), chance)
    else:
        tree = msgspec.to_builtins(message, builtin_types=(bytes,))
        value = altered(tree, chance)
        try:
            content = msgspec.msgpack.encode(value) if chance.random() < 0.7 else msgspec.json.encode(value)
        except (OverflowError, TypeError, RecursionError, UnicodeEncodeError):
            return
    note(content)
    for decoder in DECODERS:
        with contextlib.suppress(msgspec.MsgspecError):
            decoder.decode(content)
    _admit(content)


def _admit(content: bytes) -> None:
    """Admit the sender: a holder of the token may send anything about its node."""
    notes: list[str] = []
    admission = Admission(Token(KEY, "fuzz"), Roster(expected=4), notes.append, timeout=1.0)
    join = messages.JoinRequest(protocol=messages.PROTOCOL, info=content)
    applicant = Applicant("10.0.0.2", "10.0.0.1", join, None)  # type: ignore[arg-type]
    admitted = admission.admit(applicant, join, fatal=False)
    if isinstance(admitted, messages.Refusal):
        describe(admitted)
    else:
        assert admitted[1].host.isprintable() or not admitted[1].host.isascii()
