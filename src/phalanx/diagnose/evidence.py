"""What is known about a stalled run: nodes, ranks, stacks and collectives.

It is sent between nodes and stored in the run folder, as typed JSON.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.contract import encoding

Phase = Literal[
    "import", "join", "data", "forward", "backward", "collective", "optimizer", "checkpoint", "compile", "idle"
]  # fmt: skip


class Frame(msgspec.Struct, frozen=True):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    source: str = ""  # the text of the line, if it could be read: source.py
    guard: str = ""  # the condition on the rank that encloses the line: "if rank == 0"
    loop: int = 0  # the line at which the innermost enclosing loop begins; 0: no loop, or unknown


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The frames of a thread, innermost first."""

    name: str
    frames: tuple[Frame, ...]
    main: bool = False
    holds_gil: bool = False  # the thread held the GIL when the stacks were dumped


class CallEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """A collective or a point-to-point message, from torch's flight recorder or from the stack."""

    group: str  # the group's name
    seq: int  # number of the collective in its group; 0: unknown
    op: str  # all_reduce, broadcast, send ...
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()  # shapes of the outputs
    done: bool = False
    age: float = 0.0  # seconds since it was called
    site: tuple[Frame, ...] = ()  # call site, innermost frame first; empty: unknown
    peer: int | None = None  # the other rank of a send or recv
    tag: int | None = None
    reduction: str = ""  # SUM ...; empty: unknown
    root: int | None = None  # the root of a broadcast, reduce, gather or scatter, if known
    # the backend that recorded it: a group may have one for CPU tensors and one for CUDA, each with its own sequence
    # numbers
    backend: str = ""
    started: bool | None = None  # its kernel runs on the GPU; None: not recorded (TORCH_NCCL_ENABLE_TIMING)


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded collective without its number. A training loop repeats a few of them."""

    op: str  # as the backend recorded it
    called: str = ""  # as the script called it, if the call site shows that
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    reduction: str = ""
    root: int | None = None
    site: int = -1  # index in History.sites; -1: unknown


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one group that a rank has recorded, oldest first."""

    group: str
    backend: str
    seqs: tuple[int, ...]  # a repeated number means coalesced collectives
    kinds: tuple[int, ...]  # index in History.signatures of each collective


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives that the flight recorders of one rank still hold, without point-to-point messages."""

    sites: tuple[tuple[Frame, ...], ...] = ()  # user frames and frames that show DDP, innermost first
    signatures: tuple[Signature, ...] = ()
    groups: tuple[Recorded, ...] = ()


class GroupEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank is in one group."""

    name: str
    backend: str
    ranks: tuple[int, ...]  # global ranks in group order; empty: all ranks, or unknown
    enqueued: int = -1  # sequence number of the newest collective that was called; -1: unknown
    completed: int = -1
    description: str = ""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process, as /proc reports it."""

    pid: int
    state: str  # R runs, S sleeps, D waits for a device, T stopped, t traced, Z dead
    cpu: float = 0.0  # cores in use since the previous reading
    resident: int = 0  # bytes
    swapped: int = 0  # bytes
    major_faults: float = 0.0  # pages read from disk per second
    threads: int = 0
    sockets: int = 0  # open TCP connections
    unsent: int = 0  # bytes in their send queues
    read: float = 0.0  # bytes read per second, from files and sockets
    written: float = 0.0
    wchan: str = ""  # kernel function in which it sleeps, if readable
    children: tuple[str, ...] = ()  # "pid state command"


class Xid(msgspec.Struct, frozen=True):
    """An error that the NVIDIA driver wrote to the kernel log."""

    number: int
    age: float  # seconds
    text: str = ""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, as the driver reports it."""

    index: int
    use: float  # 0 to 1; -1: unknown, as for a MIG slice
    memory: int = 0
    lost: bool = False  # the driver no longer finds it, or requires a reset
    throttled: str = ""  # thermal, power; empty: not throttled, or unknown
    shared: bool = False  # other ranks use it too, as slices or at the same time
    ecc: int = 0  # uncorrectable memory errors since the driver was loaded
    remap_pending: bool = False  # memory rows or pages that a reset will replace
    remap_failed: bool = False  # memory rows could not be replaced
    nvlink_down: int = 0  # links that are down while others are up
    nvlink_errors: int = 0  # replays, recoveries and CRC errors of all links since the driver was loaded
    pcie_replays: int = 0  # PCIe replays since the driver was loaded
    xids: tuple[Xid, ...] = ()  # from the kernel log, if readable; newest last


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one rank.

    Flat, because it is stored as JSON and evidence of earlier runs must stay readable.
    """

    rank: int
    node: int
    device: str = ""
    step: int = -1  # the newest finished step; -1: none seen
    usual: float = 0.0  # median seconds per step, of recent steps; 0: unknown
    phase: Phase = "idle"
    since: float = 0.0  # seconds without progress of this rank
    silent: float = 0.0  # seconds since it last published its status: the GIL is held, or the process is stopped
    busy: bool = False  # its main thread computes, at changing places: slow, not stuck
    threads: tuple[ThreadStack, ...] = ()
    groups: tuple[GroupEvidence, ...] = ()
    calls: tuple[
        CallEvidence, ...
    ] = ()  # the newest call of each group, oldest first; if the last one is not done, the rank waits in it
    history: History = History()  # all collectives that are still recorded
    process: Process | None = None
    gpu: Gpu | None = None
    ended: int | None = None  # exit code, or minus the signal
    note: str = ""  # which evidence is missing, and why
    debugged: bool = False  # a debugger is attached
    store: str = ""  # host:port of the store that it uses, if that is not the launcher's store
    given: str = ""  # host:port that the launcher set, if the rank uses another store
    hosts: bool = False  # rank 0 hosts that store: the script has unset TORCHELASTIC_USE_AGENT_STORE


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one node."""

    node: int
    host: str
    silent: float = 0.0  # seconds since the last message from its agent
    lost: bool = False  # its connection is closed
    memory: int = 0  # bytes
    available: int = 0
    swapping: float = 0.0  # pages swapped in and out, per second
    finding: str = ""  # what the doctor found about the network path to it
    unreached: tuple[int, ...] = ()  # the first rank of each node that it cannot reach
    out_of_memory: str = ""  # the kernel's message about a process that it killed


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a stalled run."""

    time: float
    waited: float  # seconds since any rank made progress
    ranks: tuple[Rank, ...]
    nodes: tuple[NodeFacts, ...] = ()
    world_size: int = 0
    limit: float = 30.0  # seconds after which a run counts as stalled: --stall-timeout
    finding: str = ""  # what the doctor found about the network between nodes


_decoder: msgspec.json.Decoder[Evidence] = msgspec.json.Decoder(Evidence)
_ranks: msgspec.json.Decoder[Rank] = msgspec.json.Decoder(Rank)


def encode(evidence: Evidence | Rank) -> bytes:
    """Encode evidence as JSON."""
    return encoding.encode(evidence)


def decode(text: bytes) -> Evidence:
    """Decode evidence from JSON. Raises msgspec.MsgspecError."""
    return _decoder.decode(text)


def decode_rank(text: bytes) -> Rank:
    """Decode one rank from JSON. Raises msgspec.MsgspecError."""
    return _ranks.decode(text)
