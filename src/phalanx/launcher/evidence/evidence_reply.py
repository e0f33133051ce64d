"""The reply of a rank's probe about its stacks, groups and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from phalanx.diagnose.evidence import CallEvidence, GroupEvidence, History, ThreadStack

_MOST_RECORDED = 100_000  # collectives per rank


class EvidenceReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a rank's probe."""

    threads: tuple[ThreadStack, ...] = ()
    groups: tuple[GroupEvidence, ...] = ()
    calls: tuple[CallEvidence, ...] = ()
    history: History = History()
    store: str = ""
    given: str = ""
    hosts: bool = False


def read(answer: dict[str, Any]) -> EvidenceReply:
    """Parse the answer of a probe, in which frames are [file, line, function] to save space."""
    threads = [{**thread, "frames": _framed(thread["frames"])} for thread in answer.get("threads", ())]
    calls = [{**call, "site": _framed(call.get("site", ()))} for call in answer.get("calls", ())]
    rest: dict[str, Any] = {name: answer[name] for name in ("groups", "store", "given", "hosts") if name in answer}
    found = msgspec.convert({"threads": threads, "calls": calls, **rest}, EvidenceReply, strict=False)
    return replace(found, history=_history(answer.get("history") or {}))


def _history(recorded: dict[str, Any]) -> History:
    """Parse the flight recorder of a rank. A script can overwrite it: return nothing if it is inconsistent."""
    try:
        sites = [_framed(site) for site in recorded.get("sites", ())[:_MOST_RECORDED]]
        found = msgspec.convert({**recorded, "sites": sites}, History, strict=False)
    except (msgspec.ValidationError, TypeError, ValueError, AttributeError):
        return History()
    count = sum(len(each.seqs) for each in found.groups)
    fits = all(
        len(each.seqs) == len(each.kinds) and all(0 <= kind < len(found.signatures) for kind in each.kinds)
        for each in found.groups
    )
    sited = all(-1 <= each.site < len(found.sites) for each in found.signatures)
    return found if fits and sited and count <= _MOST_RECORDED else History()


def _framed(frames: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [{"file": _plain(file), "line": line, "function": _plain(function)} for file, line, function in frames]


def _plain(name: str) -> str:
    """Replace text that JSON cannot encode: a file name may not be valid UTF-8."""
    return name if name.isascii() else name.encode(errors="replace").decode()
