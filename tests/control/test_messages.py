"""Messages between nodes: any input gives a message or a msgspec error, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.contract.encoding import Decoder
from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.control import messages
from phalanx.control.messages import (
    AttemptEnded,
    ConnectionResumed,
    EndMessage,
    FailureReport,
    FirstStepCommitted,
    Hold,
    JoinRequest,
    Leaving,
    Log,
    Message,
    NodeInfo,
    NodeWorkerFailed,
    NoteMessage,
    Peer,
    PeerList,
    Ping,
    Pong,
    Refusal,
    Regroup,
    RegroupReady,
    ResumeRequest,
    SignalReceived,
    Start,
    StartRanks,
    Stop,
    Waiting,
    Welcome,
)
from tests.kit.placements import placement

DECODERS: dict[str, Decoder[Any]] = {
    name: getattr(messages, name) for name in ("request", "node_info", "answer", "from_leader", "from_member")
}
CLAIM = PartialPlacement(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1)
FULL = NodeInfo(
    run="r", member=3, host="h", pid=1, slots=8, versions={"torch": "2"}, terms={"script": "a"}, claim=CLAIM, time=1.5
)
PLACE = StartRanks(
    placements=tuple(
        placement(rank, 4, local_rank=rank - 2, local_world_size=2, node_rank=1, node_count=2) for rank in (2, 3)
    ),
    topology="0-1/2-3",
    store_port=29500,
)
DEATH = FailureReport(rank=1, code=-9, time=1.0, stderr=("a", "b"), block="text")
EXAMPLES: dict[str, list[Message]] = {
    "request": [
        JoinRequest(protocol=2, info=messages.encode(FULL)),
        ResumeRequest(member=1, session=b"s" * 16, received=7),
    ],
    "node_info": [FULL],
    "answer": [
        Refusal(kind="run", leader="a", member="b"),
        ConnectionResumed(received=3),
        Welcome(member=1, run="r", leader="h", node_timeout=15.0, notes=("n",)),
    ],
    "from_leader": [
        Ping(time=1.0),
        Waiting(text="t"),
        Start(attempt=0, place=PLACE),
        Regroup(attempt=0, generation=2, why="w", place=PLACE),
        Hold(attempt=0, why="w"),
        PeerList(
            leader=0,
            successors=(Peer(member=1, host="h", address="10.0.0.1", port=29500),),
            working=((1, 1),),
            spares=((3, 9),),
        ),
        Stop(signal=15, reason="r", grace=1.0, ends=True),
        EndMessage(code=3),
        NoteMessage(text="t"),
    ],
    "from_member": [
        Pong(ping=1.0, time=2.0),
        NodeWorkerFailed(rank=1, reason="r", time=1.0),
        RegroupReady(connected=True, all_connected=True),
        FirstStepCommitted(generation=1, step=7),
        SignalReceived(signal=2),
        Log(rank=0, stream=1, data=b"x\xff", skipped=3, ended=True),
        AttemptEnded(attempt=1, failed=2, first=DEATH),
        NoteMessage(text="t"),
        Leaving(code=1, text="t"),
    ],
}
ALL = [(name, example) for name, examples in EXAMPLES.items() for example in examples]


@pytest.mark.parametrize(("name", "message"), ALL, ids=lambda value: getattr(type(value), "__name__", ""))
def test_there_and_back(name: str, message: Message) -> None:
    assert DECODERS[name].decode(messages.encode(message)) == message


@pytest.mark.parametrize("name", DECODERS)
def test_messages_of_another_direction_are_not_decoded(name: str) -> None:
    known = {type(example) for example in EXAMPLES[name]}
    for _, message in ALL:
        if type(message) not in known:
            with pytest.raises(msgspec.ValidationError):
                DECODERS[name].decode(messages.encode(message))


def decoded(name: str, data: bytes) -> None:
    began = time.process_time()
    try:
        message = DECODERS[name].decode(data)
    except msgspec.MsgspecError:
        message = None
    assert time.process_time() - began < 0.5
    assert message is None or isinstance(message, Message)


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=300))
def test_random_bytes(name: str, data: bytes) -> None:
    decoded(name, data)


@pytest.mark.parametrize(("name", "message"), ALL, ids=lambda value: getattr(type(value), "__name__", ""))
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_message_with_changed_bytes(name: str, message: Message, data: st.DataObject) -> None:
    content = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        what = data.draw(st.sampled_from(["set", "insert", "delete"]))
        if what == "delete" and len(content) > 1:
            del content[place]
        elif what == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            content[place] = data.draw(st.integers(0, 255))
    decoded(name, bytes(content))


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None, max_examples=40)
@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
    tag=st.sampled_from([str(type(message).__struct_config__.tag) for _, message in ALL]),
)
def test_other_values_under_our_names(name: str, data: Any, tag: str) -> None:
    decoded(name, msgspec.msgpack.encode(data))
    names = {field for _, message in ALL for field in message.__struct_fields__}
    decoded(name, msgspec.msgpack.encode({"is": tag, **dict.fromkeys(names, data)}))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 100_000,  # nested arrays
        b"\x81\xa1a" * 50_000,  # nested maps
        b"\x82\xa2is\xa4note\xa4text" + b"\x91" * 50_000,
        b"\xdd\xff\xff\xff\xff",  # an array with a very large length
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x82\xa2is\xa5start\xa5ranks\xdd\xff\xff\xff\xff",
    ],
)
def test_bombs(name: str, bomb: bytes) -> None:
    decoded(name, bomb)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("request", JoinRequest(protocol=2, info=b"a" * (messages.JOIN_REQUEST_LIMIT + 1))),
        ("node_info", msgspec.structs.replace(FULL, slots=-1)),
        ("node_info", msgspec.structs.replace(FULL, host="h" * 257)),
        ("node_info", msgspec.structs.replace(FULL, terms={str(n): "" for n in range(65)})),
        ("from_member", SignalReceived(signal=0)),
        ("from_member", SignalReceived(signal=40)),
        ("from_member", Log(rank=0, stream=3)),
        ("from_member", NoteMessage(text="x" * ((1 << 16) + 1))),
        ("from_leader", EndMessage(code=256)),
    ],
    ids=str,
)
def test_beyond_the_limits(name: str, message: Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODERS[name].decode(messages.encode(message))


def test_every_signal_that_is_let_through_has_a_name() -> None:
    # The receiver looks up the name of the signal.
    for number in range(1, 65):
        content = messages.encode(SignalReceived(signal=number))
        try:
            messages.from_member.decode(content)
        except msgspec.ValidationError:
            continue
        assert signal.Signals(number).name


def test_every_pid_that_there_may_be() -> None:
    # /proc/sys/kernel/pid_max can be this high, and is with systemd.
    for pid in (os.getpid(), 1 << 22):
        arrival = msgspec.structs.replace(FULL, pid=pid)
        assert messages.node_info.decode(messages.encode(arrival)).pid == pid


def test_bytes_that_are_not_text_are_shown_escaped() -> None:
    # Python represents bytes of a file name that are not text like this.
    odd = b"caf\xe9".decode(errors="surrogateescape")
    over = AttemptEnded(attempt=0, failed=1, first=msgspec.structs.replace(DEATH, stderr=(odd, "fine"), block=odd))
    decoded = messages.from_member.decode(messages.encode(over))
    assert isinstance(decoded, AttemptEnded)
    assert decoded.first == msgspec.structs.replace(DEATH, stderr=("caf?", "fine"), block="caf?")
    arrival = msgspec.structs.replace(FULL, terms={"script": odd})
    assert messages.node_info.decode(messages.encode(arrival)).terms == {"script": "caf?"}
    assert messages.from_member.decode(messages.encode(Log(rank=0, stream=1, data=b"\xff"))) == Log(
        rank=0, stream=1, data=b"\xff"
    )
