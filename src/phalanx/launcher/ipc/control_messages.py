"""Messages of the control socket: requests of `phalanx why`, `attach` and viewers to an agent, and its replies.

Followers and the leader forward `LogQuery`, `SearchQuery` and their replies to each other, and `WhyReply`.
"""

from __future__ import annotations

import msgspec

from phalanx.contract.encoding import Decoder
from phalanx.contract.events import StepTiming
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.verdict import Verdict
from phalanx.watch.source import LogPart, SearchResult, Stream

QUERY_LIMIT = 1 << 16  # bytes
REPLY_LIMIT = 1 << 26  # bytes
WHY_LIMIT = 1 << 30  # bytes: evidence about thousands of ranks has tens of megabytes


class ControlCall(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a caller. The query is decoded after the key was checked."""

    key: str
    query: msgspec.Raw


class ControlQuery(msgspec.Struct, frozen=True, kw_only=True, tag_field="query"):
    """A request to the agent of a run."""


class WhyQuery(ControlQuery, frozen=True, kw_only=True, tag="why"):
    """Requests what the ranks wait for."""


class TimingsQuery(ControlQuery, frozen=True, kw_only=True, tag="timings"):
    """Requests how long each rank computes and waits."""


class WatchQuery(ControlQuery, frozen=True, kw_only=True, tag="watch"):
    """Requests all events from `since` on. They follow the reply, one JSON object per line."""

    since: float | None = None


class LogQuery(ControlQuery, frozen=True, kw_only=True, tag="log"):
    """Requests a part of the output of a rank: from byte `start`, or the end if that is None."""

    rank: int
    stream: Stream = "stdout"
    start: int | None = None
    size: int = 1 << 16


class SearchQuery(ControlQuery, frozen=True, kw_only=True, tag="search"):
    """Requests lines of output that contain a text. `ranks`: None for all."""

    text: str
    ranks: tuple[int, ...] | None = None
    most: int = 200


class AttachQuery(ControlQuery, frozen=True, kw_only=True, tag="attach"):
    """Requests a debugger in a rank. With `port`, debugpy listens there."""

    rank: int
    pid: int  # of the caller
    port: int | None = None


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="reply"):
    """The reply of an agent."""


class QueryRefused(ControlReply, frozen=True, kw_only=True, tag="refused"):
    """There is no answer. `why` and `fix` are for the user."""

    why: str
    fix: str = ""


class WhyReply(ControlReply, frozen=True, kw_only=True, tag="why"):
    """What the ranks wait for, and which are to blame."""

    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    report: str


class TimingsReply(ControlReply, frozen=True, kw_only=True, tag="timings"):
    """How long each rank computes and waits. `late`: a sentence per straggler; `table`: the lines to print."""

    ranks: tuple[StepTiming, ...]
    late: tuple[str, ...]
    table: tuple[str, ...]


class WatchReply(ControlReply, frozen=True, kw_only=True, tag="watch"):
    """Events follow. `early`: those of a node that has not joined yet."""

    early: bool


class LogReply(ControlReply, frozen=True, kw_only=True, tag="log"):
    """Part of the output of a rank."""

    part: LogPart


class SearchReply(ControlReply, frozen=True, kw_only=True, tag="search"):
    """Lines that match. Those of rank -1 explain why a node did not answer."""

    found: tuple[SearchResult, ...]


class AttachedReply(ControlReply, frozen=True, kw_only=True, tag="attached"):
    """A debugger is in the rank. The message carries a socket to it, unless debugpy listens on `host`:`port`."""

    how: str  # breakpoint, stopped, looking, listens
    place: str = ""
    port: int = 0
    host: str = ""


AnyQuery = WhyQuery | TimingsQuery | WatchQuery | LogQuery | SearchQuery | AttachQuery
AnyReply = QueryRefused | WhyReply | TimingsReply | WatchReply | LogReply | SearchReply | AttachedReply

calls: Decoder[ControlCall] = Decoder(ControlCall)
queries: Decoder[AnyQuery] = Decoder(AnyQuery)
replies: Decoder[AnyReply] = Decoder(AnyReply)
