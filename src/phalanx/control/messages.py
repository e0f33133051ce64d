"""The messages between agents: typed, bounded, and never code.

member                         leader
  | ------- connects ------------> |   TLS: both prove that they have the token (tls.py)
  | ------- JoinRequest ---------> |   a NodeInfo
  | <------ Welcome or Refusal --- |
  | <=== messages ===============> |
  | ------- connects again ------> |   if the connection broke
  | ------- ResumeRequest -------> |
  | <- ConnectionResumed, Refusal  |
  | <=== messages ===============> |   each one once, and in order: outbox.py
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from phalanx.contract.encoding import Decoder, encode_msgpack
from phalanx.contract.ranks.placement import MAX_NODES, MAX_RANKS, PartialPlacement, RankPlacement

PROTOCOL = 5

JOIN_REQUEST_LIMIT = 1 << 16  # bytes of the first message of a connection
FRAME_LIMIT = 1 << 20  # bytes of a frame from a member
RPC_FRAME_LIMIT = 1 << 18  # bytes of one frame of a call
RPC_LIMIT = 1 << 25  # bytes of a whole call

Count = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Signal = Annotated[int, Meta(ge=1, le=31)]  # those that have a name
Port = Annotated[int, Meta(ge=0, le=65535)]
Session = Annotated[bytes, Meta(max_length=32)]
Names = Annotated[dict[Name, Name], Meta(max_length=64)]
Ranges = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_NODES)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", array_like=False, omit_defaults=True):
    """Base of all messages."""


# -- handshake


class JoinRequest(Message, frozen=True, kw_only=True, tag="join-request"):
    """The first message of a member."""

    protocol: int
    info: Annotated[bytes, Meta(max_length=JOIN_REQUEST_LIMIT)]  # an encoded NodeInfo: other versions have other fields


class ResumeRequest(Message, frozen=True, kw_only=True, tag="resume-request"):
    """The first message of a member whose connection broke."""

    member: Count
    session: Session
    received: Count  # messages of the leader


class ConnectionResumed(Message, frozen=True, kw_only=True, tag="resumed"):
    """The member continues with a new connection."""

    received: Count  # messages of the member


class AttemptState(Message, frozen=True, kw_only=True, tag="attempt-state"):
    """The attempt that runs on a member whose leader is lost, and the readiness of its workers."""

    attempt: Count
    generation: Count
    connected: bool
    finished: bool
    all_connected: bool


class NodeInfo(Message, frozen=True, kw_only=True, tag="node-info"):
    """What a node reports about itself when it joins."""

    run: Name  # id of the run, if given by the user
    member: Count | None  # None: the leader assigns it
    host: Name
    pid: Annotated[int, Meta(ge=0, le=1 << 31)]  # the kernel counts up to at most 1 << 22
    slots: Count  # number of workers
    versions: Names
    terms: Names  # settings that must be the same on all nodes: "script", "nodes", …
    claim: PartialPlacement | None = None  # this agent is a task of a scheduler, which has assigned the rank
    trouble: Text = ""  # why it cannot take part
    time: float = 0.0
    failover_port: Port = 0  # port at which it would listen as leader
    resumes: AttemptState | None = None  # it comes from a lost leader; None: it has no workers


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """Why a node cannot join."""

    kind: Name
    leader: Text  # value of the leader
    member: Text = ""  # value of the member


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The node has joined."""

    member: Count
    run: Name  # name of the run, on all nodes
    leader: Name  # host of the leader
    node_timeout: float
    quiet: float = 3.0  # seconds without a message from the leader after which a note is printed
    session: Session = b""  # a secret that identifies this member after a broken connection
    resume: float = 5.0  # seconds for a new connection after the old one broke
    notes: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()


# -- after the handshake


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Sent by the leader to each member. `received`: how many messages of the member it has received."""

    time: float
    received: Count = 0


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """The answer to a ping."""

    ping: float  # the time in the ping
    time: float  # of the member
    received: Count = 0  # messages of the leader, before this ping


class Waiting(Message, frozen=True, kw_only=True, tag="waiting"):
    """The progress of the rendezvous."""

    text: Text


class StartRanks(Message, frozen=True, kw_only=True, tag="start-ranks"):
    """The placements of the workers of the receiving member, and what they need to know about the others."""

    placements: Annotated[tuple[RankPlacement, ...], Meta(min_length=1)]
    topology: Annotated[str, Meta(max_length=FRAME_LIMIT)]  # contract/ranks/topology.py
    store_port: Port  # at the address at which the member has reached the leader
    spare: bool = False  # the workers have no ranks yet
    joins: bool = False  # they get ranks as soon as they have started


class Start(Message, frozen=True, kw_only=True, tag="start"):
    """Start an attempt."""

    attempt: Count
    place: StartRanks
    generation: Count = 0


class Regroup(Message, frozen=True, kw_only=True, tag="regroup"):
    """The group changes: replace failed workers, and have the others form the group again."""

    attempt: Count
    generation: Count
    why: Text
    place: StartRanks
    halt: bool = False  # save the state, and end


class Hold(Message, frozen=True, kw_only=True, tag="hold"):
    """Too few nodes remain: make the workers wait for a regroup."""

    attempt: Count
    why: Text


class Peer(Message, frozen=True, kw_only=True, tag="peer"):
    """A member, and the address at which it could be reached as leader."""

    member: Count
    host: Name
    address: Name
    port: Port


class PeerList(Message, frozen=True, kw_only=True, tag="peer-list"):
    """All members of the leader, and which of them would replace it.

    It is sent to all members at each change, so its size must not grow with their number: only the first successors
    have an address, and members are listed as ranges of numbers. A range is its first and its last number.
    """

    leader: Count
    successors: Annotated[tuple[Peer, ...], Meta(max_length=64)]  # in their order
    working: Ranges = ()  # members that have ranks, without the leader
    spares: Ranges = ()  # the other members


class HaltAll(Message, frozen=True, kw_only=True, tag="halt"):
    """Halt of contract/messages/worker_messages.py, for all workers of the member."""

    step: Annotated[int, Meta(ge=0)] | None = None


class RankLeft(Message, frozen=True, kw_only=True, tag="rank-left"):
    """A rank has exited without an error in the middle of the training: no group can form without it.

    Its node sends it to the leader, and the leader to all members.
    """

    attempt: Count


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Stop the workers. `ends`: the run ends, as if by that signal."""

    signal: Signal
    reason: Text
    grace: float
    ends: bool = False


class ForwardSignal(Message, frozen=True, kw_only=True, tag="forward-signal"):
    """Send this signal to the workers; nothing ends."""

    signal: Signal


class EndMessage(Message, frozen=True, kw_only=True, tag="end"):
    """The run is over on all nodes, with this exit code."""

    code: Annotated[int, Meta(ge=0, le=255)]
    text: Text = ""
    preempted: bool = False


class RegroupReady(Message, frozen=True, kw_only=True, tag="regroup-ready"):
    """Whether the workers of this member can regroup: some have connected, and none has finished.

    `all_connected`: a regroup does not wait for imports.
    """

    connected: bool
    finished: bool = False
    all_connected: bool = False


class NodeWorkerFailed(Message, frozen=True, kw_only=True, tag="worker-failed"):
    """A worker has failed."""

    rank: Count
    reason: Text
    time: float  # by the member's clock
    place: Text = ""
    uptime: float = 0.0
    step: Annotated[int, Meta(ge=0)] | None = None
    generation: Annotated[int, Meta(ge=-1)] = -1  # of the group that it was in
    retry_chance: Literal["over", "stopped", "none", "little", "some"] = "some"  # likelihood that a retry succeeds
    idle: Annotated[float, Meta(ge=0)] = 0.0  # seconds without a newer step


class FirstStepCommitted(Message, frozen=True, kw_only=True, tag="first-step"):
    """The first step after a regroup is committed."""

    generation: Count
    step: Annotated[int, Meta(ge=0)]
    before: Annotated[int, Meta(ge=0)] = 0


class NodeBatchSkipped(Message, frozen=True, kw_only=True, tag="batch-skipped"):
    """BatchSkipped of contract/messages/worker_messages.py: rank 0 is on this node."""

    step: Annotated[int, Meta(ge=0)]
    what: Text
    seconds: Annotated[float, Meta(ge=0)] = 0.0


class SignalReceived(Message, frozen=True, kw_only=True, tag="signal-received"):
    """A member received a signal to end the run. `preempt`: after a checkpoint, if possible."""

    signal: Signal
    preempt: bool = False


class NodeHaltAck(Message, frozen=True, kw_only=True, tag="halt-ack"):
    """HaltAck of contract/messages/worker_messages.py, of one rank."""

    rank: Count
    step: Annotated[int, Meta(ge=0)]
    generation: Count
    stuck: bool = False


class NodeHalted(Message, frozen=True, kw_only=True, tag="halted"):
    """A checkpoint of this step is on disk."""

    step: Annotated[int, Meta(ge=0)]


class Log(Message, frozen=True, kw_only=True, tag="log"):
    """Output of a rank, for the terminal of the leader."""

    rank: Count
    stream: Annotated[int, Meta(ge=1, le=2)]
    data: Annotated[bytes, Meta(max_length=FRAME_LIMIT // 2)] = b""
    skipped: Annotated[int, Meta(ge=0)] = 0  # bytes omitted before it, which are in the file
    ended: bool = False


class FailureReport(Message, frozen=True, kw_only=True, tag="failure-report"):
    """A worker that failed (launcher/runs/root_cause.py: ProcessFailure), with the description of its own node."""

    rank: Count
    code: Annotated[int, Meta(ge=-64, le=255)]
    time: float
    stopped: bool = False
    device: Name = ""
    error: Text = ""
    stderr: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    memory: Text = ""
    block: Text = ""
    blame: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()


class FailedRanks(Message, frozen=True, kw_only=True, tag="failed-ranks"):
    """Ranks of one node that failed in the same way."""

    place: Text = ""  # what failed and where, equal for the same failure; empty: unknown
    text: Text = ""  # description of the failure
    lost_peer: bool = False  # because another rank had failed
    late: bool = False  # after they were asked to stop
    ranks: Annotated[tuple[Count, ...], Meta(max_length=1 << 16)] = ()


class CleanExitReport(Message, frozen=True, kw_only=True, tag="clean-exit"):
    """A worker that exited with exit code 0 (launcher/runs/root_cause.py: CleanExit)."""

    rank: Count
    time: float
    in_training: bool = False


class AttemptEnded(Message, frozen=True, kw_only=True, tag="attempt-ended"):
    """All workers of a member have ended."""

    attempt: Count
    failed: Count = 0
    kinds: Annotated[tuple[FailedRanks, ...], Meta(max_length=64)] = ()  # those that were not just stopped
    first: FailureReport | None = None  # the first cause on this node
    exited: Annotated[tuple[CleanExitReport, ...], Meta(max_length=1 << 12)] = ()  # without an error, and not stopped
    trouble: Text = ""  # the reason, if it did not end because of a worker
    left: Text = ""  # processes that its workers left running, and what happens to them


class NoteMessage(Message, frozen=True, kw_only=True, tag="note"):
    """A line for the console."""

    text: Text


class RpcFrame(Message, frozen=True, kw_only=True, tag="rpc"):
    """A call between nodes: launcher/ipc/node_rpc.py. `more`: another part follows."""

    kind: Name
    number: Annotated[int, Meta(ge=0)]
    content: Annotated[bytes, Meta(max_length=RPC_FRAME_LIMIT)] = b""
    more: bool = False


class Leaving(Message, frozen=True, kw_only=True, tag="leaving"):
    """A member leaves, with the reason. Without this message it counts as lost."""

    code: Annotated[int, Meta(ge=0, le=255)] = 0
    text: Text = ""


FromLeader = (
    Ping
    | Waiting
    | Start
    | Regroup
    | Hold
    | PeerList
    | HaltAll
    | RankLeft
    | Stop
    | ForwardSignal
    | EndMessage
    | NoteMessage
    | RpcFrame
)
FromMember = (
    Pong
    | RegroupReady
    | RankLeft
    | NodeWorkerFailed
    | FirstStepCommitted
    | NodeBatchSkipped
    | SignalReceived
    | NodeHaltAck
    | NodeHalted
    | Log
    | AttemptEnded
    | NoteMessage
    | RpcFrame
    | Leaving
)

request: Decoder[JoinRequest | ResumeRequest] = Decoder(JoinRequest | ResumeRequest, "msgpack")
node_info: Decoder[NodeInfo] = Decoder(NodeInfo, "msgpack")
answer: Decoder[Welcome | ConnectionResumed | Refusal] = Decoder(Welcome | ConnectionResumed | Refusal, "msgpack")
from_leader: Decoder[FromLeader] = Decoder(FromLeader, "msgpack")
from_member: Decoder[FromMember] = Decoder(FromMember, "msgpack")


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return encode_msgpack(message)
