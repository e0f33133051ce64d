"""Describes what a rank is doing, in a few words."""

from __future__ import annotations

from phalanx.diagnose import words
from phalanx.diagnose.evidence import CallEvidence
from phalanx.diagnose.rank_state import MEETINGS, RankState, bucket, site


def described(state: RankState) -> str:
    """Return e.g. "all_reduce #214 (DDP, 6.5 MB) at train.py:52"."""
    call = state.call
    if call is None:
        if state.act.what in MEETINGS:
            name = "init_process_group" if state.act.what == "join" else "new_group"
            return f"{name}{words.at(state.place)}"
        if state.act.what == "leaving":
            name = "destroy_process_group" if state.act.name == "destroy_process_group" else "the end of its script"
            return f"{name}{words.at(state.place)}"
        if not state.act.words and state.place is not None and not state.works:
            return words.at(state.place).strip()
        return f"{state.act.words or 'at work'}{words.at(state.place)}"
    if call.op in ("send", "recv"):
        peer = "" if call.peer is None else f" {'to' if call.op == 'send' else 'from'} rank {call.peer}"
        tag = f" (tag {call.tag})" if call.tag else ""
        return f"{call.op}{peer}{tag}{words.at(site(state, call))}"
    return f"{named(state, call)}{words.at(site(state, call))}"


def being(state: RankState) -> str:
    """Return e.g. "in all_reduce #214 at train.py:52" or "sleeping at train.py:33"."""
    inside = state.call is not None or state.act.what in (*MEETINGS, "leaving")
    return f"{'in ' if inside else ''}{described(state)}"


def named(state: RankState, call: CallEvidence) -> str:
    """Return e.g. "all_reduce #214 (DDP bucket 1, 6.5 MB)"."""
    about = []
    if bucket(call, state.frames if call is state.call else ()):
        number = _bucket_number(state, call)
        about.append("DDP" if number is None else f"DDP bucket {number}")
    if words.size(call):
        about.append(words.quantity(words.size(call)))
    return words.numbered(call) + (f" ({', '.join(about)})" if about else "")


def _bucket_number(state: RankState, call: CallEvidence) -> int | None:
    """Return the number of a gradient bucket: the buckets since the last collective that was not a bucket."""
    before = [each for each in state.rank.calls if each.group == call.group and each.seq < call.seq]
    seen = {call.shapes}
    for count, each in enumerate(reversed(before)):
        if not bucket(each):
            return count if each.site or not each.op.startswith("all_reduce") else None
        if each.shapes in seen:
            return None
        seen.add(each.shapes)
    return None
