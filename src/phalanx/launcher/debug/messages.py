"""Messages between nodes about ranks in a debugger. Streams to a debugger are separate: see `RemoteStreams`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from phalanx.contract.encoding import Decoder

KIND = "debugged"  # of the RPC frames that carry these messages


class DebugMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="message"):
    """A message to or from the leader."""


class DebuggedHere(DebugMessage, frozen=True, kw_only=True, tag="here"):
    """The ranks of a follower that are in a debugger, to the leader."""

    ranks: list[int]


class DebuggedAnywhere(DebugMessage, frozen=True, kw_only=True, tag="anywhere"):
    """The ranks of all nodes that are in a debugger, from the leader."""

    ranks: list[int]


class AtBreakpoint(DebugMessage, frozen=True, kw_only=True, tag="breakpoint"):
    """A rank of a follower waits for a terminal, to the leader."""

    rank: int
    place: Annotated[str, msgspec.Meta(max_length=1000)]


messages: Decoder[DebuggedHere | DebuggedAnywhere | AtBreakpoint] = Decoder(
    DebuggedHere | DebuggedAnywhere | AtBreakpoint
)
