"""A group across machines: an engine within each, and wires between their leaders, the lowest rank of each.

Reductions go machine by machine: within one in the order of its ranks, then in the order of the machines. So every rank
has the same bits, every time, but not those that as many ranks have on one machine. After an error the group is of no
more use.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.call_header import CallHeader, check, travels
from phalanx.collectives.errors import CollectiveTimeout, GroupAborted, PeerLost
from phalanx.collectives.failure_propagation import FailurePropagation, as_ours
from phalanx.collectives.neighbours import Neighbours, named

from .bundles import Room, combine, finish, pack, pieces_of, unpack, wider
from .engine import ANYONE, CallKind, Engine, EngineCall, Reduction, as_bytes, spread
from .gloo import GlooMessage
from .gloo_transport import AnySource, GlooTransport, within
from .routes import chain, tree
from .sums import Sum
from .threaded import ENDED, Threaded

PIECE = 1 << 22  # bytes that are on the wires while others are reduced and handed out
HEAD, DATA = (1 << 31) - 1, (1 << 31) - 2  # tags of the leaders' own


class HierarchicalEngine(Threaded):
    """`inner`: of the ranks of this machine alone, numbered from 0 in their order. `ranks`: numbers in the world."""

    def __init__(
        self, store: dist.Store, neighbours: Neighbours, inner: Engine, timeout: float, ranks: Sequence[int] = ()
    ) -> None:
        rank, size = neighbours.here[inner.rank], sum(map(len, neighbours.machines))
        super().__init__(rank, size)
        self._named = partial(named, names=tuple(ranks))
        self._inner = inner
        self._machines = neighbours.machines
        self._mine = neighbours.mine
        self._here = neighbours.here
        self._of = {other: number for number, ranks in enumerate(self._machines) for other in ranks}
        self._leads = rank == self._here[0]
        self._others = [number for number in range(len(self._machines)) if number != self._mine]
        self._wires = GlooTransport(dist.PrefixStore("wires", store), rank, size, timeout)
        words = dist.PrefixStore("causes", store)
        self._causes = FailurePropagation(words, rank, neighbours, self._named, over=lambda: self._ended)
        self._heads = [CallHeader() for _ in self._machines] if self._leads else []
        self._next_heads = [CallHeader() for _ in self._heads]
        self._coming: list[Any] = []
        self._count = 0
        self._broken: Exception | None = None
        self._deadline = 0.0
        self._room = Room()
        self._ways = {
            CallKind.ALL_REDUCE: self._all_reduce,
            CallKind.REDUCE: self._reduce,
            CallKind.BROADCAST: self._broadcast,
            CallKind.ALL_GATHER: self._all_gather,
            CallKind.GATHER: self._gather,
            CallKind.SCATTER: self._scatter,
            CallKind.REDUCE_SCATTER: self._reduce_scatter,
            CallKind.ALL_TO_ALL: self._all_to_all,
            CallKind.BARRIER: self._barrier,
        }

    # -- from rank to rank: all by wires, since gloo's and the inner engine's cannot both be asked for "anyone"

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> GlooMessage:
        with self._trouble("send to", to, timeout):
            work = self._wires.send(tensor, to, _allowed(tag))
        return GlooMessage(work, partial(self._trouble, "send to", to, timeout), timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> GlooMessage:
        with self._trouble("recv from", source, timeout):
            work = self._wires.recv(tensor, source, _allowed(tag))
        trouble = partial(self._trouble, "recv from", source, timeout)
        return (
            AnySource(work, trouble, timeout, lambda: self._ended)
            if source == ANYONE
            else GlooMessage(work, trouble, timeout)
        )

    @contextlib.contextmanager
    def _trouble(self, what: str, peer: int, timeout: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            what = f"{what} {'any rank' if peer == ANYONE else self._named([peer])}"
            raise GroupAborted(ENDED) if self._ended else as_ours(error, what, timeout) from None

    # -- calls

    def close(self) -> None:
        super().close()
        self._inner.close()
        self._wires.close()  # and what it still expected is forgotten
        self._coming = []

    def _interrupt(self) -> None:
        self._wires.cut()
        self._inner.abort()

    def _do(self, call: EngineCall) -> None:
        if self._broken is not None:
            raise type(self._broken)(f"{call.kind.name.lower()}: this group has ended before: {self._broken}")
        self._deadline = time.monotonic() + call.timeout if call.timeout else 0.0
        self._count += 1
        own = call.ins if call.kind == CallKind.GATHER else call.outs
        nothing = call.kind != CallKind.ALL_TO_ALL and not any(tensor.numel() for tensor in own)
        way = self._barrier if nothing else self._ways[call.kind]
        try:
            way(call)
        except Exception as error:
            if self._leads:
                self._wires.cut()  # so that the other leaders give up as well
            cause = self._causes.of(GroupAborted(ENDED) if self._ended else error, call, self._leads or self._ended)
            self._broken = cause
            if self._leads:
                self._inner.abort()  # once the cause is told: who waits there asks for it
                if not isinstance(error, PeerLost | CollectiveTimeout):  # which they have seen themselves
                    self._causes.heard()
            raise cause from error

    def _barrier(self, call: EngineCall) -> None:
        self._within(CallKind.BARRIER)
        self._agree(call)
        self._within(CallKind.BARRIER)

    def _all_reduce(self, call: EngineCall) -> None:
        how, pieces = _reduction(call), pieces_of(call.outs[0].view(-1), PIECE)
        sums: list[Sum] = []
        for step in range(len(pieces) + 2):
            # One piece is reduced here, while the one before is on its way, and the one before that comes back.
            if step < len(pieces):
                mine = self._wide(pieces[step], f"wide {step % 3}")
                self._within(CallKind.REDUCE, outs=[mine], reduction=Reduction(how.op, how.before))
                along = self._agree(call, mine if len(pieces) == 1 else None) if step == 0 else []
                sums.append(Sum(self, mine, how.op, f"{step % 3}", along))
            if 1 <= step <= len(pieces):
                sums[step - 1].reduce()
            if step >= 2:
                piece, total = pieces[step - 2], sums[step - 2]
                total.end()
                if self._leads:
                    finish(piece, total.mine, how, self.size)
                self._within(CallKind.BROADCAST, outs=[piece])

    def _reduce(self, call: EngineCall) -> None:
        how, root, at = _reduction(call), call.root, self._of[call.root]
        sends = []
        for number, piece in enumerate(pieces_of(call.outs[0].view(-1), PIECE)):
            # What is on its way has to stay; elsewhere than at the root, `piece` is not to be written.
            name = "mine" if self._mine == at else f"mine {number}"
            mine = self._wide(piece, name, keep=self._leads and self.rank != root)
            self._within(CallKind.REDUCE, outs=[mine], reduction=Reduction(how.op, how.before))
            if number == 0:
                self._agree(call)
            if self._mine != at:
                sends.append(self._send(mine, at))
                continue
            parts = [
                mine if other == at else self._room.like(f"of {other}", mine) for other in range(len(self._machines))
            ]
            self._wait(*[self._recv(parts[other], other) for other in self._others])
            result = self._room.like("result", piece)
            if self._leads:
                finish(result, combine(mine, parts, how.op), how, self.size)
            self._deal(
                [result if rank == root else result[:0] for rank in self._here],
                piece if self.rank == root else piece[:0],
            )
        self._wait(*sends)

    def _broadcast(self, call: EngineCall) -> None:
        at, pieces = self._of[call.root], pieces_of(call.outs[0].view(-1), PIECE)
        giver, heirs = (
            chain(self._mine, at, len(self._machines)) if len(pieces) > 1 else tree(self._mine, at, len(self._machines))
        )
        inner_root = self._here.index(call.root) if self._mine == at else 0
        sends = []
        recvs: list[Any] = []
        for number, piece in enumerate(pieces):
            if self._mine == at:
                self._within(CallKind.BROADCAST, outs=[piece], root=inner_root)
            if number == 0:
                self._agree(call)
                if giver is not None:
                    recvs = [self._recv(piece, giver) for piece in pieces]
            if giver is not None:
                self._wait(recvs[number])
            sends += [self._send(piece, heir) for heir in heirs]
            if self._mine != at:
                self._within(CallKind.BROADCAST, outs=[piece])
        self._wait(*sends)

    def _all_gather(self, call: EngineCall) -> None:
        outs = [as_bytes(out) for out in spread(call.outs, self.size)]
        self._within(CallKind.ALL_GATHER, [as_bytes(call.ins[0])], [outs[rank] for rank in self._here])
        self._agree(call)
        boxes, recvs = [], []
        for number, ranks in enumerate(self._machines):
            whole = len(call.outs) == 1 and ranks[-1] - ranks[0] == len(ranks) - 1  # lies in one piece as it is
            if whole:
                part = as_bytes(call.outs[0])
                each = part.numel() // self.size
                box = part[ranks[0] * each : (ranks[-1] + 1) * each]
            else:
                box = self._room.bytes(f"of {number}", sum(outs[rank].numel() for rank in ranks))
                if number == self._mine and self._leads:
                    pack(box, [outs[rank] for rank in ranks])
            pieces = pieces_of(box, PIECE)
            boxes.append((box, whole, pieces))
            recvs.append([self._recv(piece, number) for piece in pieces] if number != self._mine else [])
        sends = [self._send(piece, other) for piece in boxes[self._mine][2] for other in self._others]
        for other in self._others:
            box, whole, pieces = boxes[other]
            for piece, recv in zip(pieces, recvs[other], strict=True):
                self._wait(recv)
                self._within(CallKind.BROADCAST, outs=[piece])
            if not whole:
                unpack(box, [outs[rank] for rank in self._machines[other]])
        self._wait(*sends)

    def _gather(self, call: EngineCall) -> None:
        part, root, at = as_bytes(call.ins[0]), call.root, self._of[call.root]
        inner_root = self._here.index(root) if self._mine == at else 0
        outs = [as_bytes(out) for out in spread(call.outs, self.size)] if self.rank == root else []
        local = [outs[rank] for rank in self._here] if outs else []
        box = self._box("box", part, self._mine)
        if self._mine != at and self._leads:
            local = list(box.chunk(len(self._here)))
        self._within(CallKind.GATHER, [part], local, root=inner_root)
        self._agree(call)
        if self._mine != at:
            self._wait(*[self._send(piece, at) for piece in pieces_of(box, PIECE)])
            return
        boxes = {other: self._box(f"of {other}", part, other) for other in self._others}
        self._wait(*[self._recv(piece, other) for other, box in boxes.items() for piece in pieces_of(box, PIECE)])
        for other, box in boxes.items():
            given = self._box("given", part, other) if self.rank == root else box[:0]
            self._deal([box if rank == root else box[:0] for rank in self._here], given)
            if outs:
                unpack(given, [outs[rank] for rank in self._machines[other]])

    def _scatter(self, call: EngineCall) -> None:
        part, root, at = as_bytes(call.outs[0]), call.root, self._of[call.root]
        if self._mine != at:
            box = self._box("box", part, self._mine)
            self._agree(call)
            self._wait(*[self._recv(piece, at) for piece in pieces_of(box, PIECE)])
            self._within(CallKind.SCATTER, box.chunk(len(self._here)) if self._leads else [], [part])
            return
        ins = [as_bytes(part) for part in spread(call.ins, self.size)] if self.rank == root else []
        local = [ins[rank] for rank in self._here] if ins else []
        self._within(CallKind.SCATTER, local, [part], root=self._here.index(root))
        sends = []
        for number, other in enumerate(self._others):
            box = self._box("box", part, other)
            mine = pack(box, [ins[rank] for rank in self._machines[other]]) if ins else box[:0]
            sizes = [box.numel() if rank == root else 0 for rank in self._here]
            taken = self._collect(f"to {other}", mine, sizes)
            if number == 0:
                self._agree(call)
            sends += [self._send(piece, other) for piece in pieces_of(taken, PIECE)]
        self._wait(*sends)

    def _reduce_scatter(self, call: EngineCall) -> None:
        ins, out, how = spread(call.ins, self.size), call.outs[0].view(-1), _reduction(call)
        sends: list[Any] = []
        for number, other in enumerate([*self._others, self._mine]):
            parts = [ins[rank] for rank in self._machines[other]]
            box = pack(self._room.get(f"to {other}", out.numel() * len(parts), wider(out.dtype)), parts)
            self._within(CallKind.REDUCE, outs=[box], reduction=Reduction(how.op, how.before))
            if number == 0:
                self._agree(call)
            if other != self._mine:
                sends += [self._send(piece, other) for piece in pieces_of(box, PIECE)]
        sums = [
            box if other == self._mine else self._room.like(f"of {other}", box) for other in range(len(self._machines))
        ]
        self._wait(*[self._recv(piece, other) for other in self._others for piece in pieces_of(sums[other], PIECE)])
        local: Sequence[torch.Tensor] = []
        if self._leads:
            result = self._room.get("result", box.numel(), out.dtype)
            finish(result, combine(box, sums, how.op), how, self.size)
            local = result.chunk(len(self._here))
        self._within(CallKind.SCATTER, local, [out])
        self._wait(*sends)

    def _all_to_all(self, call: EngineCall) -> None:
        ins = [as_bytes(part) for part in spread(call.ins, self.size)]
        outs = [as_bytes(part) for part in spread(call.outs, self.size)]
        self._within(CallKind.ALL_TO_ALL, [ins[rank] for rank in self._here], [outs[rank] for rank in self._here])
        sizes = torch.tensor([[part.numel() for part in ins], [part.numel() for part in outs]])
        all_sizes = torch.empty(len(self._here), 2, self.size, dtype=torch.int64)
        self._within(CallKind.ALL_GATHER, [sizes], list(all_sizes))
        leaving, coming = all_sizes[:, 0].tolist(), all_sizes[:, 1].tolist()
        boxes, works = {}, []
        for number, other in enumerate(self._others):
            ranks = self._machines[other]
            # Rank by rank of this machine, and of each what it has for the other's, in their order.
            mine = pack(
                self._room.bytes("mine", sum(ins[rank].numel() for rank in ranks)), [ins[rank] for rank in ranks]
            )
            box = self._collect(f"to {other}", mine, [sum(row[rank] for rank in ranks) for row in leaving])
            if number == 0:
                self._agree(call)
            boxes[other] = self._room.bytes(f"of {other}", sum(row[rank] for row in coming for rank in ranks))
            works += [self._recv(piece, other) for piece in pieces_of(boxes[other], PIECE)]
            works += [self._send(piece, other) for piece in pieces_of(box, PIECE)]
        self._wait(*works)
        for other, box in boxes.items():
            ranks = self._machines[other]
            mine = self._room.bytes("mine", sum(outs[rank].numel() for rank in ranks))
            parts: list[torch.Tensor] = []
            if self._leads:
                blocks = box.split([row[rank] for rank in ranks for row in coming])
                parts = [torch.cat(blocks[place :: len(self._here)]) for place in range(len(self._here))]
            self._deal(parts, mine)
            unpack(mine, [outs[rank] for rank in ranks])

    # -- between leaders: other ranks do nothing here

    def _agree(self, call: EngineCall, along: torch.Tensor | None = None) -> list[torch.Tensor]:
        """All leaders call the same. What was to travel along, of each machine, where it is small."""
        if not self._leads:
            return []
        along = along if along is not None and travels(along) else None
        heads, self._heads, coming = self._heads, self._next_heads, self._coming
        self._next_heads = heads
        heads[self._mine].write(self._count, call, along)
        works = [self._send(heads[self._mine].tensor, other, HEAD) for other in self._others]
        coming = coming or self._await_heads(heads)
        self._coming = self._await_heads(self._heads)  # of the next call: who is ready for it gets it at once
        self._wait(*coming, *works)
        check(self._named, {ranks[0]: head for ranks, head in zip(self._machines, heads, strict=True)})
        return [head.along(along) for head in heads] if along is not None else []

    def _await_heads(self, heads: Sequence[CallHeader]) -> list[Any]:
        return [self._recv(heads[other].tensor, other, HEAD) for other in self._others]

    def _send(self, tensor: torch.Tensor, machine: int, tag: int = DATA) -> Any:
        return self._wires.send(tensor, self._machines[machine][0], tag) if self._leads and tensor.numel() else None

    def _recv(self, tensor: torch.Tensor, machine: int, tag: int = DATA) -> Any:
        return self._wires.recv(tensor, self._machines[machine][0], tag) if self._leads and tensor.numel() else None

    def _wait(self, *works: Any) -> None:
        for work in works:
            if work is not None:
                work.wait(within(self._left()))

    # -- within the machine

    def _within(
        self,
        kind: CallKind,
        ins: Sequence[torch.Tensor] = (),
        outs: Sequence[torch.Tensor] = (),
        root: int = 0,
        reduction: Reduction | None = None,
    ) -> None:
        self._inner.run(EngineCall(kind, ins, outs, reduction, root, self._left()))

    def _collect(self, name: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """At the leader: the parts of all ranks of this machine, which may differ in size; nothing elsewhere."""
        box = self._room.bytes(name, sum(sizes) if self._leads else 0)
        none = [box[:0]] * (len(self._here) - 1)
        self._within(CallKind.ALL_TO_ALL, [part, *none], box.split(list(sizes)) if self._leads else [box[:0], *none])
        return box

    def _deal(self, parts: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """From the leader to each rank of this machine; parts may differ in size."""
        none = mine[:0]
        self._within(
            CallKind.ALL_TO_ALL,
            parts if self._leads else [none] * len(self._here),
            [mine] + [none] * (len(self._here) - 1),
        )

    def _box(self, name: str, part: torch.Tensor, machine: int) -> torch.Tensor:
        """For as much of each rank of a machine."""
        return self._room.bytes(name, part.numel() * len(self._machines[machine]))

    def _wide(self, piece: torch.Tensor, name: str, keep: bool = False) -> torch.Tensor:
        """As it is reduced: itself, unless it is of 16 bits or has to stay as it is."""
        dtype = wider(piece.dtype)
        return self._room.copy(name, piece, dtype) if keep or dtype != piece.dtype else piece

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic()) if self._deadline else 0.0


def _reduction(call: EngineCall) -> Reduction:
    return call.reduction or Reduction()


def _allowed(tag: int) -> int:
    if not 0 <= tag < DATA:
        raise ValueError(f"tag {tag}: a tag is a number from 0 to {DATA - 1}")
    return tag
