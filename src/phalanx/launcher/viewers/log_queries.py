"""Answers requests for the logs of ranks, and searches them, on whichever node they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.contract import encoding
from phalanx.contract.encoding import Decoder
from phalanx.forkserver import wire
from phalanx.launcher.output import log_reader
from phalanx.watch.source import SearchResult, Stream

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchContext

NODE_TIMEOUT = 5.0  # seconds for another node
_MOST_NOTES = 100  # about what a search left out

Query = dict[str, Any]
_queries: Decoder[Query] = Decoder(Query)


class LogQueries:
    """Answers the requests "log" and "search" of viewers on this node, and of other nodes.

    `reading` limits how many files are read at the same time.
    """

    def __init__(self, context: WatchContext, *, reading: asyncio.Semaphore) -> None:
        self._agent = context.agent
        self._coordinator = context.coordinator
        self._rpc = context.rpc
        self._folder = context.folder
        self._reading = reading
        context.control.serve("log", self._answer)
        context.control.serve("search", self._answer)
        context.rpc.serve("query", self._answer_node)

    async def _answer(self, query: wire.Message) -> wire.Message:
        try:
            return await self._read(query)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            return {"is": "refused", "why": f"invalid request: {error}"}

    async def _answer_node(self, _: int | None, content: bytes) -> bytes:
        """Answer another node: the leader about ranks of this node, a follower about all ranks."""
        reply: Query = {"is": "refused", "why": "invalid request"}
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            reply = await self._read(_queries.decode(content), here=not self._coordinator.leads)
        return encoding.encode(reply)

    async def _read(self, query: Query, *, here: bool = False) -> Query:
        own = await self._own_folders()
        if query["ask"] == "search":
            return await self._searched(query, own, here=here)
        rank = int(query["rank"])
        if rank not in own and not here:
            to = self._node_of(rank)
            if to is not None or not self._coordinator.leads:
                return await self._ask_node(to, query)
        stream: Stream = "stderr" if query.get("stream") == "stderr" else "stdout"
        start, size = query.get("start"), int(query.get("size", log_reader.PART))
        start = None if start is None else max(0, int(start))
        async with self._reading:
            found = await asyncio.to_thread(log_reader.part, own.get(rank), stream, start, size)
        return {"is": "log", **msgspec.to_builtins(found)}

    async def _searched(self, query: Query, own: dict[int, str], *, here: bool) -> Query:
        text, most = str(query["text"])[:1000], max(1, min(int(query.get("most", 200)), 1000))
        ranks = query.get("ranks")
        chosen = None if ranks is None else {int(rank) for rank in ranks}
        if not here and not self._coordinator.leads:
            return await self._ask_node(None, query)
        asked, elsewhere = [], []
        for member, theirs in self._coordinator.members().items() if not here else ():
            wanted = [rank for rank in theirs if chosen is None or rank in chosen]
            if wanted:
                asked.append(wanted)
                elsewhere.append(self._ask_node(member, {**query, "ranks": wanted}))
        folders = {rank: folder for rank, folder in own.items() if chosen is None or rank in chosen}
        async with self._reading:
            found = await asyncio.to_thread(log_reader.search, folders, text, most)
        for wanted, answer in zip(asked, await asyncio.gather(*elsewhere), strict=True):
            found += _found(answer, wanted)
        notes = [line for line in found if line.rank < 0]
        lines = sorted((line for line in found if line.rank >= 0), key=lambda line: (line.rank, line.stream))
        return {"is": "search", "found": msgspec.to_builtins(lines[:most] + notes[:_MOST_NOTES])}

    async def _own_folders(self) -> dict[int, str]:
        """Return the folders of the ranks of this node."""
        attempt = self._agent.attempt
        if attempt is None:
            return await asyncio.to_thread(log_reader.folders, self._folder.path)
        workers = [worker for worker in attempt.workers.values() if not worker.spare]
        # Living workers last: they replace dead ones of the same rank.
        workers.sort(key=lambda worker: (worker.code is None, worker.born))
        return {worker.seat.rank: worker.folder for worker in workers}

    def _node_of(self, rank: int) -> int | None:
        return next((member for member, ranks in self._coordinator.members().items() if rank in ranks), None)

    async def _ask_node(self, to: int | None, query: Query) -> Query:
        try:
            return _queries.decode(
                await self._rpc.request("query", encoding.encode(query), to=to, timeout=node_timeout(to))
            )
        except msgspec.DecodeError:
            return {}
        except TimeoutError:
            name = "node 0" if to is None else f"node {to}"
            return {"is": "refused", "why": f"{name} has not answered within {node_timeout(to):.0f} s"}


def node_timeout(to: int | None) -> float:
    """Return the timeout for a node: the leader may have to wait for another node itself."""
    return NODE_TIMEOUT if to is not None else 2 * NODE_TIMEOUT


def _found(answer: Query, wanted: Sequence[int]) -> list[SearchResult]:
    """Return what another node has found for its own ranks, or a note that says why it has not."""
    why = answer.get("why", "unreadable answer of a node")
    with contextlib.suppress(msgspec.ValidationError):
        found = msgspec.convert(answer.get("found"), list[SearchResult])
        return [line for line in found if line.rank in wanted or line.rank < 0]
    return [SearchResult(rank=-1, stream="stdout", at=0, line=str(why))]
