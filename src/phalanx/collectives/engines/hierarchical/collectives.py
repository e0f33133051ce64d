"""The nine collectives across several hosts: each host uses its own engine, and the leaders connect the hosts.

Large data is split into pieces, which are sent between hosts while other pieces are reduced and distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.collectives.engines.engine import CallKind, EngineCall, Reduction, as_bytes, spread
from phalanx.collectives.neighbours import Neighbours

from .buffers import BufferCache, accumulate_dtype, combine, finish, pack, split_pieces, unpack
from .leader_reduce import LeaderReduce
from .leaders import HostLeaders
from .local_ranks import LocalRanks

PIECE = 1 << 22  # bytes that are transferred between hosts while other pieces are reduced and distributed


class HostCollectives:
    """The collectives of one rank."""

    def __init__(
        self,
        rank: int,
        neighbours: Neighbours,
        leaders: HostLeaders,
        local: LocalRanks,
        buffers: BufferCache,
    ) -> None:
        self._rank = rank
        self._size = sum(map(len, neighbours.hosts))
        self._hosts = neighbours.hosts
        self._mine = neighbours.mine
        self._here = neighbours.here
        self._of = {other: number for number, ranks in enumerate(self._hosts) for other in ranks}
        self._leads = leaders.leads
        self._others = leaders.others
        self._leaders = leaders
        self._local = local
        self._buffers = buffers
        self._methods = {
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

    def run(self, call: EngineCall) -> None:
        """Run a call. One without data is a barrier."""
        own = call.ins if call.kind == CallKind.GATHER else call.outs
        nothing = call.kind != CallKind.ALL_TO_ALL and not any(tensor.numel() for tensor in own)
        method = self._barrier if nothing else self._methods[call.kind]
        method(call)

    def _barrier(self, call: EngineCall) -> None:
        self._local.run(CallKind.BARRIER)
        self._leaders.match_headers(call)
        self._local.run(CallKind.BARRIER)

    def _all_reduce(self, call: EngineCall) -> None:
        how, pieces = _reduction(call), split_pieces(call.outs[0].view(-1), PIECE)
        sums: list[LeaderReduce] = []
        for step in range(len(pieces) + 2):
            # Pipelined: one piece is reduced here while the previous one is sent and the one before that comes back.
            if step < len(pieces):
                mine = self._widened(pieces[step], f"wide {step % 3}")
                self._local.run(CallKind.REDUCE, outs=[mine], reduction=Reduction(how.op, how.scale))
                payload = self._leaders.match_headers(call, mine if len(pieces) == 1 else None) if step == 0 else []
                sums.append(
                    LeaderReduce(self._leaders, self._buffers, mine, how.op, name=f"{step % 3}", received=payload)
                )
            if 1 <= step <= len(pieces):
                sums[step - 1].reduce()
            if step >= 2:
                piece, total = pieces[step - 2], sums[step - 2]
                total.end()
                if self._leads:
                    finish(piece, total.mine, how, self._size)
                self._local.run(CallKind.BROADCAST, outs=[piece])

    def _reduce(self, call: EngineCall) -> None:
        how, root, at = _reduction(call), call.root, self._of[call.root]
        sends = []
        for number, piece in enumerate(split_pieces(call.outs[0].view(-1), PIECE)):
            # Keep buffers that are being sent; only the root may write to `piece`.
            name = "mine" if self._mine == at else f"mine {number}"
            mine = self._widened(piece, name, keep=self._leads and self._rank != root)
            self._local.run(CallKind.REDUCE, outs=[mine], reduction=Reduction(how.op, how.scale))
            if number == 0:
                self._leaders.match_headers(call)
            if self._mine != at:
                sends.append(self._leaders.send(mine, at))
                continue
            parts = [
                mine if other == at else self._buffers.like(f"of {other}", mine) for other in range(len(self._hosts))
            ]
            self._leaders.wait(*[self._leaders.recv(parts[other], other) for other in self._others])
            result = self._buffers.like("result", piece)
            if self._leads:
                finish(result, combine(mine, parts, how.op), how, self._size)
            self._local.distribute(
                [result if rank == root else result[:0] for rank in self._here],
                piece if self._rank == root else piece[:0],
            )
        self._leaders.wait(*sends)

    def _broadcast(self, call: EngineCall) -> None:
        at, pieces = self._of[call.root], split_pieces(call.outs[0].view(-1), PIECE)
        sender, receivers = (
            _chain(self._mine, at, len(self._hosts)) if len(pieces) > 1 else _tree(self._mine, at, len(self._hosts))
        )
        inner_root = self._here.index(call.root) if self._mine == at else 0
        sends = []
        recvs: list[Any] = []
        for number, piece in enumerate(pieces):
            if self._mine == at:
                self._local.run(CallKind.BROADCAST, outs=[piece], root=inner_root)
            if number == 0:
                self._leaders.match_headers(call)
                if sender is not None:
                    recvs = [self._leaders.recv(piece, sender) for piece in pieces]
            if sender is not None:
                self._leaders.wait(recvs[number])
            sends += [self._leaders.send(piece, receiver) for receiver in receivers]
            if self._mine != at:
                self._local.run(CallKind.BROADCAST, outs=[piece])
        self._leaders.wait(*sends)

    def _all_gather(self, call: EngineCall) -> None:
        outs = [as_bytes(out) for out in spread(call.outs, self._size)]
        self._local.run(CallKind.ALL_GATHER, [as_bytes(call.ins[0])], [outs[rank] for rank in self._here])
        self._leaders.match_headers(call)
        buffers, recvs = [], []
        for number, ranks in enumerate(self._hosts):
            whole = len(call.outs) == 1 and ranks[-1] - ranks[0] == len(ranks) - 1  # already contiguous
            if whole:
                part = as_bytes(call.outs[0])
                each = part.numel() // self._size
                buffer = part[ranks[0] * each : (ranks[-1] + 1) * each]
            else:
                buffer = self._buffers.bytes(f"of {number}", sum(outs[rank].numel() for rank in ranks))
                if number == self._mine and self._leads:
                    pack(buffer, [outs[rank] for rank in ranks])
            pieces = split_pieces(buffer, PIECE)
            buffers.append((buffer, whole, pieces))
            recvs.append([self._leaders.recv(piece, number) for piece in pieces] if number != self._mine else [])
        sends = [self._leaders.send(piece, other) for piece in buffers[self._mine][2] for other in self._others]
        for other in self._others:
            buffer, whole, pieces = buffers[other]
            for piece, recv in zip(pieces, recvs[other], strict=True):
                self._leaders.wait(recv)
                self._local.run(CallKind.BROADCAST, outs=[piece])
            if not whole:
                unpack(buffer, [outs[rank] for rank in self._hosts[other]])
        self._leaders.wait(*sends)

    def _gather(self, call: EngineCall) -> None:
        part, root, at = as_bytes(call.ins[0]), call.root, self._of[call.root]
        inner_root = self._here.index(root) if self._mine == at else 0
        outs = [as_bytes(out) for out in spread(call.outs, self._size)] if self._rank == root else []
        local = [outs[rank] for rank in self._here] if outs else []
        buffer = self._host_buffer("buffer", part, self._mine)
        if self._mine != at and self._leads:
            local = list(buffer.chunk(len(self._here)))
        self._local.run(CallKind.GATHER, [part], local, root=inner_root)
        self._leaders.match_headers(call)
        if self._mine != at:
            self._leaders.wait(*[self._leaders.send(piece, at) for piece in split_pieces(buffer, PIECE)])
            return
        buffers = {other: self._host_buffer(f"of {other}", part, other) for other in self._others}
        self._leaders.wait(
            *[
                self._leaders.recv(piece, other)
                for other, buffer in buffers.items()
                for piece in split_pieces(buffer, PIECE)
            ]
        )
        for other, buffer in buffers.items():
            received = self._host_buffer("received", part, other) if self._rank == root else buffer[:0]
            self._local.distribute([buffer if rank == root else buffer[:0] for rank in self._here], received)
            if outs:
                unpack(received, [outs[rank] for rank in self._hosts[other]])

    def _scatter(self, call: EngineCall) -> None:
        part, root, at = as_bytes(call.outs[0]), call.root, self._of[call.root]
        if self._mine != at:
            buffer = self._host_buffer("buffer", part, self._mine)
            self._leaders.match_headers(call)
            self._leaders.wait(*[self._leaders.recv(piece, at) for piece in split_pieces(buffer, PIECE)])
            self._local.run(CallKind.SCATTER, buffer.chunk(len(self._here)) if self._leads else [], [part])
            return
        ins = [as_bytes(part) for part in spread(call.ins, self._size)] if self._rank == root else []
        local = [ins[rank] for rank in self._here] if ins else []
        self._local.run(CallKind.SCATTER, local, [part], root=self._here.index(root))
        sends = []
        for number, other in enumerate(self._others):
            buffer = self._host_buffer("buffer", part, other)
            mine = pack(buffer, [ins[rank] for rank in self._hosts[other]]) if ins else buffer[:0]
            sizes = [buffer.numel() if rank == root else 0 for rank in self._here]
            taken = self._local.collect(f"to {other}", mine, sizes)
            if number == 0:
                self._leaders.match_headers(call)
            sends += [self._leaders.send(piece, other) for piece in split_pieces(taken, PIECE)]
        self._leaders.wait(*sends)

    def _reduce_scatter(self, call: EngineCall) -> None:
        ins, out, how = spread(call.ins, self._size), call.outs[0].view(-1), _reduction(call)
        sends: list[Any] = []
        for number, other in enumerate([*self._others, self._mine]):
            parts = [ins[rank] for rank in self._hosts[other]]
            buffer = pack(
                self._buffers.get(f"to {other}", out.numel() * len(parts), accumulate_dtype(out.dtype)), parts
            )
            self._local.run(CallKind.REDUCE, outs=[buffer], reduction=Reduction(how.op, how.scale))
            if number == 0:
                self._leaders.match_headers(call)
            if other != self._mine:
                sends += [self._leaders.send(piece, other) for piece in split_pieces(buffer, PIECE)]
        sums = [
            buffer if other == self._mine else self._buffers.like(f"of {other}", buffer)
            for other in range(len(self._hosts))
        ]
        self._leaders.wait(
            *[self._leaders.recv(piece, other) for other in self._others for piece in split_pieces(sums[other], PIECE)]
        )
        local: Sequence[torch.Tensor] = []
        if self._leads:
            result = self._buffers.get("result", buffer.numel(), out.dtype)
            finish(result, combine(buffer, sums, how.op), how, self._size)
            local = result.chunk(len(self._here))
        self._local.run(CallKind.SCATTER, local, [out])
        self._leaders.wait(*sends)

    def _all_to_all(self, call: EngineCall) -> None:
        ins = [as_bytes(part) for part in spread(call.ins, self._size)]
        outs = [as_bytes(part) for part in spread(call.outs, self._size)]
        self._local.run(CallKind.ALL_TO_ALL, [ins[rank] for rank in self._here], [outs[rank] for rank in self._here])
        sizes = torch.tensor([[part.numel() for part in ins], [part.numel() for part in outs]])
        all_sizes = torch.empty(len(self._here), 2, self._size, dtype=torch.int64)
        self._local.run(CallKind.ALL_GATHER, [sizes], list(all_sizes))
        leaving, coming = all_sizes[:, 0].tolist(), all_sizes[:, 1].tolist()
        buffers, works = {}, []
        for number, other in enumerate(self._others):
            ranks = self._hosts[other]
            # For each rank of this host: its data for the ranks of the other host, in order.
            mine = pack(
                self._buffers.bytes("mine", sum(ins[rank].numel() for rank in ranks)), [ins[rank] for rank in ranks]
            )
            buffer = self._local.collect(f"to {other}", mine, [sum(row[rank] for rank in ranks) for row in leaving])
            if number == 0:
                self._leaders.match_headers(call)
            buffers[other] = self._buffers.bytes(f"of {other}", sum(row[rank] for row in coming for rank in ranks))
            works += [self._leaders.recv(piece, other) for piece in split_pieces(buffers[other], PIECE)]
            works += [self._leaders.send(piece, other) for piece in split_pieces(buffer, PIECE)]
        self._leaders.wait(*works)
        for other, buffer in buffers.items():
            ranks = self._hosts[other]
            mine = self._buffers.bytes("mine", sum(outs[rank].numel() for rank in ranks))
            parts: list[torch.Tensor] = []
            if self._leads:
                blocks = buffer.split([row[rank] for rank in ranks for row in coming])
                parts = [torch.cat(blocks[place :: len(self._here)]) for place in range(len(self._here))]
            self._local.distribute(parts, mine)
            unpack(mine, [outs[rank] for rank in ranks])

    def _host_buffer(self, name: str, part: torch.Tensor, host: int) -> torch.Tensor:
        """Return a buffer for one part per rank of a host."""
        return self._buffers.bytes(name, part.numel() * len(self._hosts[host]))

    def _widened(self, piece: torch.Tensor, name: str, keep: bool = False) -> torch.Tensor:
        """Return the piece in the type that it is reduced in: a copy if it has 16 bits or must not change."""
        dtype = accumulate_dtype(piece.dtype)
        return self._buffers.copy(name, piece, dtype) if keep or dtype != piece.dtype else piece


def _chain(mine: int, root: int, count: int) -> tuple[int | None, list[int]]:
    """Return the hosts to receive from and to send to: a chain, in which long data crosses each link once."""
    place = (mine - root) % count
    return None if place == 0 else (mine - 1) % count, [(mine + 1) % count] if place < count - 1 else []


def _tree(mine: int, root: int, count: int) -> tuple[int | None, list[int]]:
    """Return the hosts to receive from and to send to: a tree, with the fewest steps."""
    place = (mine - root) % count
    step = 1 << place.bit_length()  # it has arrived in an earlier step
    receivers = []
    while place + step < count:
        receivers.append((place + step + root) % count)
        step *= 2
    sender = place - (1 << (place.bit_length() - 1)) if place else None
    return None if sender is None else (sender + root) % count, receivers


def _reduction(call: EngineCall) -> Reduction:
    return call.reduction or Reduction()
