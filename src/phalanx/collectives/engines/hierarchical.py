"""The engine for groups on several hosts: an inner engine per host, and gloo between the leaders, the lowest rank of
each.

Reductions run in rank order within each host, and then in the order of the hosts. So all ranks get the same bits every
time, but not the bits that the same ranks would get on one host. After an error the group is unusable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.call_header import CallHeader, check_match, fits_inline
from phalanx.collectives.errors import CollectiveTimeout, GroupAborted, PeerLost
from phalanx.collectives.failure_propagation import FailurePropagation, translate
from phalanx.collectives.neighbours import Neighbours, format_ranks

from .buffers import BufferCache, accumulate_dtype, combine, finish, pack, split_pieces, unpack
from .engine import ANY_SOURCE, CallKind, Engine, EngineCall, Reduction, as_bytes, spread
from .gloo import GlooMessage
from .gloo_transport import AnySourceMessage, GlooTransport, within
from .leader_reduce import LeaderReduce
from .threaded import ENDED, Threaded

PIECE = 1 << 22  # bytes that are transferred between hosts while other pieces are reduced and distributed
HEADER, DATA = (1 << 31) - 1, (1 << 31) - 2  # tags of messages between leaders


class HierarchicalEngine(Threaded):
    """`inner`: the engine of this host's ranks, numbered from 0. `ranks`: the global ranks."""

    def __init__(
        self, store: dist.Store, neighbours: Neighbours, inner: Engine, timeout: float, ranks: Sequence[int] = ()
    ) -> None:
        rank, size = neighbours.here[inner.rank], sum(map(len, neighbours.hosts))
        super().__init__(rank, size)
        self._format_ranks = partial(format_ranks, names=tuple(ranks))
        self._inner = inner
        self._hosts = neighbours.hosts
        self._mine = neighbours.mine
        self._here = neighbours.here
        self._of = {other: number for number, ranks in enumerate(self._hosts) for other in ranks}
        self._leads = rank == self._here[0]
        self._others = [number for number in range(len(self._hosts)) if number != self._mine]
        self._transport = GlooTransport(dist.PrefixStore("transport", store), rank, size, timeout)
        cause_store = dist.PrefixStore("causes", store)
        self._failures = FailurePropagation(
            cause_store, rank, neighbours, self._format_ranks, aborted=lambda: self._ended
        )
        self._headers = [CallHeader() for _ in self._hosts] if self._leads else []
        self._next_headers = [CallHeader() for _ in self._headers]
        self._posted: list[Any] = []
        self._count = 0
        self._error: Exception | None = None
        self._deadline = 0.0
        self._buffers = BufferCache()
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

    # -- messages: all through gloo, because a receive from any source cannot wait on two transports

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> GlooMessage:
        """Send a message."""
        with self._translate_errors("send to", to, timeout):
            work = self._transport.send(tensor, to, _check_tag(tag))
        return GlooMessage(work, partial(self._translate_errors, "send to", to, timeout), timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> GlooMessage:
        """Receive a message."""
        with self._translate_errors("recv from", source, timeout):
            work = self._transport.recv(tensor, source, _check_tag(tag))
        errors = partial(self._translate_errors, "recv from", source, timeout)
        return (
            AnySourceMessage(work, errors, timeout, lambda: self._ended)
            if source == ANY_SOURCE
            else GlooMessage(work, errors, timeout)
        )

    @contextlib.contextmanager
    def _translate_errors(self, what: str, peer: int, timeout: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            what = f"{what} {'any rank' if peer == ANY_SOURCE else self._format_ranks([peer])}"
            raise GroupAborted(ENDED) if self._ended else translate(error, what, timeout) from None

    # -- calls

    def close(self) -> None:
        """Close the inner engine and the connections."""
        super().close()
        self._inner.close()
        self._transport.close()  # drops receives that are still posted
        self._posted = []

    def _interrupt(self) -> None:
        self._transport.cut()
        self._inner.abort()

    def _do(self, call: EngineCall) -> None:
        if self._error is not None:
            raise type(self._error)(f"{call.kind.name.lower()}: this group has failed before: {self._error}")
        self._deadline = time.monotonic() + call.timeout if call.timeout else 0.0
        self._count += 1
        own = call.ins if call.kind == CallKind.GATHER else call.outs
        nothing = call.kind != CallKind.ALL_TO_ALL and not any(tensor.numel() for tensor in own)
        method = self._barrier if nothing else self._methods[call.kind]
        try:
            method(call)
        except Exception as error:
            if self._leads:
                self._transport.cut()  # so that the other leaders give up, too
            cause = self._failures.cause(
                GroupAborted(ENDED) if self._ended else error, call, self._leads or self._ended
            )
            self._error = cause
            if self._leads:
                self._inner.abort()  # after the cause is published: ranks that wait there read it
                if not isinstance(error, PeerLost | CollectiveTimeout):  # which the ranks have seen themselves
                    self._failures.wait_for_readers()
            raise cause from error

    def _barrier(self, call: EngineCall) -> None:
        self._run_inner(CallKind.BARRIER)
        self._match_headers(call)
        self._run_inner(CallKind.BARRIER)

    def _all_reduce(self, call: EngineCall) -> None:
        how, pieces = _reduction(call), split_pieces(call.outs[0].view(-1), PIECE)
        sums: list[LeaderReduce] = []
        for step in range(len(pieces) + 2):
            # Pipelined: one piece is reduced here while the previous one is sent and the one before that comes back.
            if step < len(pieces):
                mine = self._widened(pieces[step], f"wide {step % 3}")
                self._run_inner(CallKind.REDUCE, outs=[mine], reduction=Reduction(how.op, how.scale))
                payload = self._match_headers(call, mine if len(pieces) == 1 else None) if step == 0 else []
                sums.append(LeaderReduce(self, mine, how.op, f"{step % 3}", payload))
            if 1 <= step <= len(pieces):
                sums[step - 1].reduce()
            if step >= 2:
                piece, total = pieces[step - 2], sums[step - 2]
                total.end()
                if self._leads:
                    finish(piece, total.mine, how, self.size)
                self._run_inner(CallKind.BROADCAST, outs=[piece])

    def _reduce(self, call: EngineCall) -> None:
        how, root, at = _reduction(call), call.root, self._of[call.root]
        sends = []
        for number, piece in enumerate(split_pieces(call.outs[0].view(-1), PIECE)):
            # Keep buffers that are being sent; only the root may write to `piece`.
            name = "mine" if self._mine == at else f"mine {number}"
            mine = self._widened(piece, name, keep=self._leads and self.rank != root)
            self._run_inner(CallKind.REDUCE, outs=[mine], reduction=Reduction(how.op, how.scale))
            if number == 0:
                self._match_headers(call)
            if self._mine != at:
                sends.append(self._send(mine, at))
                continue
            parts = [
                mine if other == at else self._buffers.like(f"of {other}", mine) for other in range(len(self._hosts))
            ]
            self._wait(*[self._recv(parts[other], other) for other in self._others])
            result = self._buffers.like("result", piece)
            if self._leads:
                finish(result, combine(mine, parts, how.op), how, self.size)
            self._distribute(
                [result if rank == root else result[:0] for rank in self._here],
                piece if self.rank == root else piece[:0],
            )
        self._wait(*sends)

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
                self._run_inner(CallKind.BROADCAST, outs=[piece], root=inner_root)
            if number == 0:
                self._match_headers(call)
                if sender is not None:
                    recvs = [self._recv(piece, sender) for piece in pieces]
            if sender is not None:
                self._wait(recvs[number])
            sends += [self._send(piece, receiver) for receiver in receivers]
            if self._mine != at:
                self._run_inner(CallKind.BROADCAST, outs=[piece])
        self._wait(*sends)

    def _all_gather(self, call: EngineCall) -> None:
        outs = [as_bytes(out) for out in spread(call.outs, self.size)]
        self._run_inner(CallKind.ALL_GATHER, [as_bytes(call.ins[0])], [outs[rank] for rank in self._here])
        self._match_headers(call)
        buffers, recvs = [], []
        for number, ranks in enumerate(self._hosts):
            whole = len(call.outs) == 1 and ranks[-1] - ranks[0] == len(ranks) - 1  # contiguous already
            if whole:
                part = as_bytes(call.outs[0])
                each = part.numel() // self.size
                buffer = part[ranks[0] * each : (ranks[-1] + 1) * each]
            else:
                buffer = self._buffers.bytes(f"of {number}", sum(outs[rank].numel() for rank in ranks))
                if number == self._mine and self._leads:
                    pack(buffer, [outs[rank] for rank in ranks])
            pieces = split_pieces(buffer, PIECE)
            buffers.append((buffer, whole, pieces))
            recvs.append([self._recv(piece, number) for piece in pieces] if number != self._mine else [])
        sends = [self._send(piece, other) for piece in buffers[self._mine][2] for other in self._others]
        for other in self._others:
            buffer, whole, pieces = buffers[other]
            for piece, recv in zip(pieces, recvs[other], strict=True):
                self._wait(recv)
                self._run_inner(CallKind.BROADCAST, outs=[piece])
            if not whole:
                unpack(buffer, [outs[rank] for rank in self._hosts[other]])
        self._wait(*sends)

    def _gather(self, call: EngineCall) -> None:
        part, root, at = as_bytes(call.ins[0]), call.root, self._of[call.root]
        inner_root = self._here.index(root) if self._mine == at else 0
        outs = [as_bytes(out) for out in spread(call.outs, self.size)] if self.rank == root else []
        local = [outs[rank] for rank in self._here] if outs else []
        buffer = self._host_buffer("buffer", part, self._mine)
        if self._mine != at and self._leads:
            local = list(buffer.chunk(len(self._here)))
        self._run_inner(CallKind.GATHER, [part], local, root=inner_root)
        self._match_headers(call)
        if self._mine != at:
            self._wait(*[self._send(piece, at) for piece in split_pieces(buffer, PIECE)])
            return
        buffers = {other: self._host_buffer(f"of {other}", part, other) for other in self._others}
        self._wait(
            *[self._recv(piece, other) for other, buffer in buffers.items() for piece in split_pieces(buffer, PIECE)]
        )
        for other, buffer in buffers.items():
            received = self._host_buffer("received", part, other) if self.rank == root else buffer[:0]
            self._distribute([buffer if rank == root else buffer[:0] for rank in self._here], received)
            if outs:
                unpack(received, [outs[rank] for rank in self._hosts[other]])

    def _scatter(self, call: EngineCall) -> None:
        part, root, at = as_bytes(call.outs[0]), call.root, self._of[call.root]
        if self._mine != at:
            buffer = self._host_buffer("buffer", part, self._mine)
            self._match_headers(call)
            self._wait(*[self._recv(piece, at) for piece in split_pieces(buffer, PIECE)])
            self._run_inner(CallKind.SCATTER, buffer.chunk(len(self._here)) if self._leads else [], [part])
            return
        ins = [as_bytes(part) for part in spread(call.ins, self.size)] if self.rank == root else []
        local = [ins[rank] for rank in self._here] if ins else []
        self._run_inner(CallKind.SCATTER, local, [part], root=self._here.index(root))
        sends = []
        for number, other in enumerate(self._others):
            buffer = self._host_buffer("buffer", part, other)
            mine = pack(buffer, [ins[rank] for rank in self._hosts[other]]) if ins else buffer[:0]
            sizes = [buffer.numel() if rank == root else 0 for rank in self._here]
            taken = self._collect(f"to {other}", mine, sizes)
            if number == 0:
                self._match_headers(call)
            sends += [self._send(piece, other) for piece in split_pieces(taken, PIECE)]
        self._wait(*sends)

    def _reduce_scatter(self, call: EngineCall) -> None:
        ins, out, how = spread(call.ins, self.size), call.outs[0].view(-1), _reduction(call)
        sends: list[Any] = []
        for number, other in enumerate([*self._others, self._mine]):
            parts = [ins[rank] for rank in self._hosts[other]]
            buffer = pack(
                self._buffers.get(f"to {other}", out.numel() * len(parts), accumulate_dtype(out.dtype)), parts
            )
            self._run_inner(CallKind.REDUCE, outs=[buffer], reduction=Reduction(how.op, how.scale))
            if number == 0:
                self._match_headers(call)
            if other != self._mine:
                sends += [self._send(piece, other) for piece in split_pieces(buffer, PIECE)]
        sums = [
            buffer if other == self._mine else self._buffers.like(f"of {other}", buffer)
            for other in range(len(self._hosts))
        ]
        self._wait(*[self._recv(piece, other) for other in self._others for piece in split_pieces(sums[other], PIECE)])
        local: Sequence[torch.Tensor] = []
        if self._leads:
            result = self._buffers.get("result", buffer.numel(), out.dtype)
            finish(result, combine(buffer, sums, how.op), how, self.size)
            local = result.chunk(len(self._here))
        self._run_inner(CallKind.SCATTER, local, [out])
        self._wait(*sends)

    def _all_to_all(self, call: EngineCall) -> None:
        ins = [as_bytes(part) for part in spread(call.ins, self.size)]
        outs = [as_bytes(part) for part in spread(call.outs, self.size)]
        self._run_inner(CallKind.ALL_TO_ALL, [ins[rank] for rank in self._here], [outs[rank] for rank in self._here])
        sizes = torch.tensor([[part.numel() for part in ins], [part.numel() for part in outs]])
        all_sizes = torch.empty(len(self._here), 2, self.size, dtype=torch.int64)
        self._run_inner(CallKind.ALL_GATHER, [sizes], list(all_sizes))
        leaving, coming = all_sizes[:, 0].tolist(), all_sizes[:, 1].tolist()
        buffers, works = {}, []
        for number, other in enumerate(self._others):
            ranks = self._hosts[other]
            # For each rank of this host: what it has for the ranks of the other host, in order.
            mine = pack(
                self._buffers.bytes("mine", sum(ins[rank].numel() for rank in ranks)), [ins[rank] for rank in ranks]
            )
            buffer = self._collect(f"to {other}", mine, [sum(row[rank] for rank in ranks) for row in leaving])
            if number == 0:
                self._match_headers(call)
            buffers[other] = self._buffers.bytes(f"of {other}", sum(row[rank] for row in coming for rank in ranks))
            works += [self._recv(piece, other) for piece in split_pieces(buffers[other], PIECE)]
            works += [self._send(piece, other) for piece in split_pieces(buffer, PIECE)]
        self._wait(*works)
        for other, buffer in buffers.items():
            ranks = self._hosts[other]
            mine = self._buffers.bytes("mine", sum(outs[rank].numel() for rank in ranks))
            parts: list[torch.Tensor] = []
            if self._leads:
                blocks = buffer.split([row[rank] for rank in ranks for row in coming])
                parts = [torch.cat(blocks[place :: len(self._here)]) for place in range(len(self._here))]
            self._distribute(parts, mine)
            unpack(mine, [outs[rank] for rank in ranks])

    # -- between leaders: other ranks return at once

    def _match_headers(self, call: EngineCall, payload: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Check that all leaders make the same call. Return the small data of each host that was sent with the
        headers.
        """
        if not self._leads:
            return []
        payload = payload if payload is not None and fits_inline(payload) else None
        headers, self._headers, coming = self._headers, self._next_headers, self._posted
        self._next_headers = headers
        headers[self._mine].write(self._count, call, payload)
        works = [self._send(headers[self._mine].tensor, other, HEADER) for other in self._others]
        coming = coming or self._post_headers(headers)
        self._posted = self._post_headers(
            self._headers
        )  # post those of the next call early, so that they arrive at once
        self._wait(*coming, *works)
        check_match(self._format_ranks, {ranks[0]: header for ranks, header in zip(self._hosts, headers, strict=True)})
        return [header.payload(payload) for header in headers] if payload is not None else []

    def _post_headers(self, headers: Sequence[CallHeader]) -> list[Any]:
        return [self._recv(headers[other].tensor, other, HEADER) for other in self._others]

    def _send(self, tensor: torch.Tensor, host: int, tag: int = DATA) -> Any:
        return self._transport.send(tensor, self._hosts[host][0], tag) if self._leads and tensor.numel() else None

    def _recv(self, tensor: torch.Tensor, host: int, tag: int = DATA) -> Any:
        return self._transport.recv(tensor, self._hosts[host][0], tag) if self._leads and tensor.numel() else None

    def _wait(self, *works: Any) -> None:
        for work in works:
            if work is not None:
                work.wait(within(self._left()))

    # -- within the host

    def _run_inner(
        self,
        kind: CallKind,
        ins: Sequence[torch.Tensor] = (),
        outs: Sequence[torch.Tensor] = (),
        root: int = 0,
        reduction: Reduction | None = None,
    ) -> None:
        self._inner.run(EngineCall(kind, ins, outs, reduction, root, self._left()))

    def _collect(self, name: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Collect the parts of this host's ranks at the leader. Parts may differ in size; empty on other ranks."""
        buffer = self._buffers.bytes(name, sum(sizes) if self._leads else 0)
        none = [buffer[:0]] * (len(self._here) - 1)
        self._run_inner(
            CallKind.ALL_TO_ALL, [part, *none], buffer.split(list(sizes)) if self._leads else [buffer[:0], *none]
        )
        return buffer

    def _distribute(self, parts: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Give each rank of this host its part from the leader. Parts may differ in size."""
        none = mine[:0]
        self._run_inner(
            CallKind.ALL_TO_ALL,
            parts if self._leads else [none] * len(self._here),
            [mine] + [none] * (len(self._here) - 1),
        )

    def _host_buffer(self, name: str, part: torch.Tensor, host: int) -> torch.Tensor:
        """Return a buffer for one part per rank of a host."""
        return self._buffers.bytes(name, part.numel() * len(self._hosts[host]))

    def _widened(self, piece: torch.Tensor, name: str, keep: bool = False) -> torch.Tensor:
        """Return the piece in the type that it is reduced in: a copy if it has 16 bits or must not change."""
        dtype = accumulate_dtype(piece.dtype)
        return self._buffers.copy(name, piece, dtype) if keep or dtype != piece.dtype else piece

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic()) if self._deadline else 0.0


def _chain(mine: int, root: int, count: int) -> tuple[int | None, list[int]]:
    """Return from which host to receive and to which to send: a chain, in which long data crosses each link once."""
    place = (mine - root) % count
    return None if place == 0 else (mine - 1) % count, [(mine + 1) % count] if place < count - 1 else []


def _tree(mine: int, root: int, count: int) -> tuple[int | None, list[int]]:
    """Return from which host to receive and to which to send: a tree, with the fewest steps."""
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


def _check_tag(tag: int) -> int:
    if not 0 <= tag < DATA:
        raise ValueError(f"tag {tag}: expected a number from 0 to {DATA - 1}")
    return tag
