"""The bytes that a simulated node sends: created once per assignment, so that a second of thousands of nodes is cheap.

Numbers that change every second have a fixed width and are replaced in the finished frame.
"""

from __future__ import annotations

import struct

from phalanx.contract import encoding
from phalanx.contract.events import NodeRanks, RankInfo, RankSample
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.control import messages
from phalanx.control.leader.server import PATH
from phalanx.control.messages import Message
from phalanx.diagnose.evidence import CallEvidence, Frame, GroupEvidence, NodeFacts, Process, Rank, ThreadStack
from phalanx.diagnose.rules.stragglers import Total
from phalanx.launcher.hangs.cluster_progress import NodeHeartbeat
from phalanx.launcher.hangs.node_evidence import NodeEvidence
from phalanx.launcher.hangs.progress_tracker import RankProgress
from phalanx.launcher.telemetry.collector import NodeSamples

FIRST_STEP = 100_000  # all steps have six digits
_STEP, _TICK = 777_777, 77_777_777_777  # placeholders of the numbers in a prepared frame
_GROUP = "0"  # the name of the default group
_LINE = b"step 123456  loss 2.3456  lr 0.000123  1234.5 samples/s  12.3 GB  epoch 3  batch 1234 of 5678\n"

UPGRADE = (
    f"GET {PATH} HTTP/1.1\r\nHost: leader\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: cGhhbGFueCBiZW5jaCBzYw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
).encode()


def frame(message: Message) -> bytes:
    """Return a message as a websocket frame of a client. Its mask is zero, so that the content needs no change."""
    content = messages.encode(message)
    size = len(content)
    if size < 126:
        head = struct.pack("!BB", 0x82, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x82, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", 0x82, 0x80 | 127, size)
    return head + bytes(4) + content


def parse(data: bytearray) -> list[bytes]:
    """Remove all whole binary frames of a server from `data` and return their contents."""
    found, at = [], 0
    while len(data) - at >= 2:
        kind, size, begin = data[at] & 0x0F, data[at + 1] & 0x7F, at + 2
        if size == 126:
            begin += 2
        elif size == 127:
            begin += 8
        if len(data) < begin:
            break
        if size >= 126:
            size = int.from_bytes(data[at + 2 : begin], "big")
        if len(data) < begin + size:
            break
        if kind == 2:
            found.append(bytes(data[begin : begin + size]))
        at = begin + size
    del data[:at]
    return found


class Telemetry:
    """The telemetry of one node: what its sampler sends every `period` seconds, and its evidence about a stall."""

    def __init__(self, placements: tuple[RankPlacement, ...], host: str, slow: frozenset[int], period: int) -> None:
        self._placements = placements
        self._host = host
        self._slow = slow  # ranks that the others wait for while the run is stalled
        self._period = period
        self._frames: dict[tuple[bool, bool], bytes] = {}

    def message(self, tick: int, step: int, *, stalled: bool, timings: bool) -> bytes:
        """Return the frame of one period. `tick`: tenths of a second. `timings`: with the totals of all steps."""
        key = (stalled, timings)
        if key not in self._frames:
            self._frames[key] = self._prepared(stalled=stalled, timings=timings)
        return self._frames[key].replace(b"%d" % _TICK, b"%d" % tick).replace(b"%d" % _STEP, b"%d" % step)

    def _prepared(self, *, stalled: bool, timings: bool) -> bytes:
        node = self._placements[0].node_rank
        sections: dict[str, object] = {
            "progress": NodeHeartbeat(
                node=node,
                host=self._host,
                ranks=tuple(self._progress(place.rank, stalled=stalled) for place in self._placements),
            ),
            "samples": NodeSamples(
                tick=_TICK,
                seconds=float(self._period),
                infos=NodeRanks(
                    node=node,
                    host=self._host,
                    ranks=tuple(
                        RankInfo(rank=place.rank, pid=40_000, device=f"cuda:{place.local_rank}")
                        for place in self._placements
                    ),
                ),
                ranks=tuple(self._sample(place.rank, stalled=stalled) for place in self._placements),
            ),
        }
        if timings:
            sections["timings"] = [
                Total(
                    rank=place.rank,
                    samples={"forward": 4000, "backward": 8000, "optimizer": 900, "data": 300, "collective": 700},
                    steps=_STEP,
                    seconds=600.0,
                    host=self._host,
                    gpu=place.local_rank,
                )
                for place in self._placements
            ]
        return frame(messages.RpcFrame(kind="telemetry", number=0, content=encoding.encode(sections)))

    def _progress(self, rank: int, *, stalled: bool) -> RankProgress:
        waits = stalled and rank not in self._slow
        return RankProgress(
            rank=rank,
            step=_STEP,
            progress=_STEP,
            phase="collective" if waits else "data" if stalled else "backward",
            busy=not stalled,
            works=not stalled,
            usual=0.9876,
            batches=_STEP,
        )

    def _sample(self, rank: int, *, stalled: bool) -> RankSample:
        phases = ("wwwwwwwwww" if stalled else "dffffbbbbO") * self._period
        return RankSample(
            rank=rank,
            step=_STEP,
            phases=phases,
            data=0.1,
            compute=0.8,
            waiting=0.1,
            cpu=1.01,
            memory=12_345_678_912,
            gpu=0.98,
            gpu_memory=67_890_123_456,
            samples=128.5,
            place="train.py:123 step",
        )

    def evidence(self, step: int) -> bytes:
        """Return the evidence of this node about a stall, as JSON."""
        node = self._placements[0].node_rank
        facts = NodeFacts(node=node, host=self._host, memory=1 << 40, available=1 << 39)
        ranks = tuple(self._rank(place, step) for place in self._placements)
        return encoding.encode(NodeEvidence(node=facts, ranks=ranks))

    def _rank(self, place: RankPlacement, step: int) -> Rank:
        slow = place.rank in self._slow
        stack = _LOADING if slow else _WAITING
        done = CallEvidence(group=_GROUP, seq=step, op="all_reduce", done=True, age=20.0, backend="nccl")
        waits = CallEvidence(group=_GROUP, seq=step + 1, op="all_reduce", age=9.0, backend="nccl", site=_WAITING[-2:])
        group = GroupEvidence(
            name=_GROUP,
            backend="nccl",
            ranks=(),  # all ranks
            enqueued=step if slow else step + 1,
            completed=step,
        )
        return Rank(
            rank=place.rank,
            node=place.node_rank,
            device=f"cuda:{place.local_rank}",
            step=step,
            phase="data" if slow else "collective",
            threads=(
                ThreadStack(name="MainThread", frames=stack, main=True),
                ThreadStack(name="Thread-1 (_pin_memory_loop)", frames=_PINNING),
            ),
            groups=(group,),
            calls=(done,) if slow else (done, waits),
            process=Process(pid=40_000, state="S", resident=12 << 30, threads=48, wchan="futex_wait_queue"),
        )


_TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
_WAITING = (
    Frame(f"{_TORCH}/autograd/graph.py", 825, "_engine_run_backward"),
    Frame(f"{_TORCH}/autograd/__init__.py", 347, "backward"),
    Frame(f"{_TORCH}/_tensor.py", 648, "backward"),
    Frame("/home/user/project/train.py", 123, "step", source="loss.backward()"),
    Frame("/home/user/project/train.py", 210, "main", source="step(model, batch)"),
)
_LOADING = (
    Frame("/home/user/project/dataset.py", 41, "__getitem__", source="return self.images[number]"),
    Frame(f"{_TORCH}/utils/data/_utils/fetch.py", 52, "fetch"),
    Frame(f"{_TORCH}/utils/data/dataloader.py", 757, "_next_data"),
    Frame(f"{_TORCH}/utils/data/dataloader.py", 701, "__next__"),
    Frame("/home/user/project/train.py", 208, "main", source="for batch in loader:"),
)
_PINNING = (
    Frame("/usr/lib/python3.12/threading.py", 355, "wait"),
    Frame("/usr/lib/python3.12/multiprocessing/queues.py", 103, "get"),
    Frame(f"{_TORCH}/utils/data/_utils/pin_memory.py", 52, "_pin_memory_loop"),
)


def log_line(rank: int) -> bytes:
    """Return the frame of one line of a rank's output."""
    return frame(messages.Log(rank=rank, stream=1, data=_LINE))
