"""Answers requests for the logs of ranks, and searches them, on any node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.contract import encoding
from phalanx.contract.encoding import Decoder
from phalanx.launcher.ipc.control_messages import LogQuery, LogReply, QueryRefused, SearchQuery, SearchReply
from phalanx.launcher.output import log_reader
from phalanx.watch.source import SearchResult

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchContext

NODE_TIMEOUT = 5.0  # seconds for another node
_MOST_NOTES = 100  # about omitted parts of a search
_UNREADABLE = "unreadable answer of a node"

_queries: Decoder[LogQuery | SearchQuery] = Decoder(LogQuery | SearchQuery)
_replies: Decoder[LogReply | SearchReply | QueryRefused] = Decoder(LogReply | SearchReply | QueryRefused)


class LogQueries:
    """Answers the requests "log" and "search" of viewers on this node, and of other nodes.

    `reading` limits how many files are read at the same time.
    """

    def __init__(self, context: WatchContext, *, reading: asyncio.Semaphore) -> None:
        self._agent = context.agent
        self._links = context.links
        self._rpc = context.rpc
        self._folder = context.folder
        self._reading = reading
        context.control.serve(LogQuery, self._log)
        context.control.serve(SearchQuery, self._search)
        context.rpc.serve("query", self._answer_node)

    async def _answer_node(self, _: int | None, content: bytes) -> bytes:
        """Answer another node: the leader about ranks of this node, a follower about all ranks."""
        reply: LogReply | SearchReply | QueryRefused = QueryRefused(why="invalid request")
        with contextlib.suppress(msgspec.DecodeError, OverflowError):
            query, here = _queries.decode(content), not self._links.leads
            if isinstance(query, SearchQuery):
                reply = await self._search(query, here=here)
            else:
                reply = await self._log(query, here=here)
        return encoding.encode(reply)

    async def _log(self, query: LogQuery, *, here: bool = False) -> LogReply | QueryRefused:
        own = await self._own_folders()
        if query.rank not in own and not here:
            to = self._node_of(query.rank)
            if to is not None or not self._links.leads:
                reply = await self._ask_node(to, query)
                return reply if not isinstance(reply, SearchReply) else QueryRefused(why=_UNREADABLE)
        start = None if query.start is None else max(0, query.start)
        async with self._reading:
            found = await asyncio.to_thread(log_reader.part, own.get(query.rank), query.stream, start, query.size)
        return LogReply(part=found)

    async def _search(self, query: SearchQuery, *, here: bool = False) -> SearchReply | QueryRefused:
        text, most = query.text[:1000], max(1, min(query.most, 1000))
        chosen = None if query.ranks is None else set(query.ranks)
        own = await self._own_folders()
        if not here and not self._links.leads:
            reply = await self._ask_node(None, query)
            return reply if not isinstance(reply, LogReply) else QueryRefused(why=_UNREADABLE)
        asked, elsewhere = [], []
        for member, theirs in self._links.members().items() if not here else ():
            wanted = [rank for rank in theirs if chosen is None or rank in chosen]
            if wanted:
                asked.append(wanted)
                elsewhere.append(self._ask_node(member, replace(query, ranks=tuple(wanted))))
        folders = {rank: folder for rank, folder in own.items() if chosen is None or rank in chosen}
        async with self._reading:
            found = await asyncio.to_thread(log_reader.search, folders, text, most)
        for wanted, answer in zip(asked, await asyncio.gather(*elsewhere), strict=True):
            found += _found(answer, wanted)
        notes = [line for line in found if line.rank < 0]
        lines = sorted((line for line in found if line.rank >= 0), key=lambda line: (line.rank, line.stream))
        return SearchReply(found=(*lines[:most], *notes[:_MOST_NOTES]))

    async def _own_folders(self) -> dict[int, str]:
        """Return the folders of the ranks of this node."""
        attempt = self._agent.attempt
        if attempt is None:
            return await asyncio.to_thread(log_reader.folders, self._folder.path)
        workers = [worker for worker in attempt.workers.values() if not worker.spare]
        # Living workers last: they replace dead ones of the same rank.
        workers.sort(key=lambda worker: (worker.code is None, worker.started_at))
        return {worker.seat.rank: worker.folder for worker in workers}

    def _node_of(self, rank: int) -> int | None:
        return next((member for member, ranks in self._links.members().items() if rank in ranks), None)

    async def _ask_node(self, to: int | None, query: LogQuery | SearchQuery) -> LogReply | SearchReply | QueryRefused:
        try:
            return _replies.decode(
                await self._rpc.request("query", encoding.encode(query), to=to, timeout=node_timeout(to))
            )
        except msgspec.DecodeError:
            return QueryRefused(why=_UNREADABLE)
        except TimeoutError:
            name = "node 0" if to is None else f"node {to}"
            return QueryRefused(why=f"{name} has not answered within {node_timeout(to):.0f} s")


def node_timeout(to: int | None) -> float:
    """Return the timeout for a node: the leader may have to wait for another node itself."""
    return NODE_TIMEOUT if to is not None else 2 * NODE_TIMEOUT


def _found(answer: LogReply | SearchReply | QueryRefused, wanted: Sequence[int]) -> list[SearchResult]:
    """Return what another node has found for its own ranks, or a note with the reason if it found nothing."""
    if isinstance(answer, SearchReply):
        return [line for line in answer.found if line.rank in wanted or line.rank < 0]
    why = answer.why if isinstance(answer, QueryRefused) else _UNREADABLE
    return [SearchResult(rank=-1, stream="stdout", at=0, line=why)]
