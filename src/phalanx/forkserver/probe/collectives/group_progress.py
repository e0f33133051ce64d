"""The process groups of this process: names, ranks and progress."""

from __future__ import annotations

import sys
import time
from typing import Any

from . import recorders
from .recorders import WORLD

_SEARCH_EVERY = 400  # repeat the search for names after this many times its duration

names: dict[tuple[str, str], str] = {}  # recorder, its number of a group -> name of the group
_next_search = 0.0  # when names may be searched for again


def progress() -> list[dict[str, Any]]:
    """Return the progress of each group. Cheap: called ten times per second."""
    if not recorders.is_initialized():
        return []
    found = []
    for recorder in recorders.RECORDERS:
        status = recorders.read(recorder, collectives=False).get("pg_status", {})
        for number, one in status.items():
            if "name" in one:
                names[recorder, number] = str(one["name"])
            # Records other than NCCL's can be read at any time.
            elif recorder != "nccl" and (recorder, number) not in names:
                _find_name(recorder, number)
        for number, one in current_only(recorder, status).items():
            found.append(
                {
                    "id": number,
                    "name": names.get((recorder, number), ""),
                    "nccl": recorder == "nccl",
                    "enqueued": int(one.get("last_enqueued_collective", -1)),
                    "completed": int(one.get("last_completed_collective", -1)),
                }
            )
    return found


def current_only(recorder: str, status: dict[str, Any]) -> dict[str, Any]:
    """Remove groups that no longer exist: a new group has the name of an earlier one and a higher number. Calls that
    were pending when a group was lost stay pending forever.
    """
    newest: dict[str, int] = {}
    for number in status:
        name = names.get((recorder, number), "")
        newest[name] = max(int(number), newest.get(name, -1))
    return {
        number: one
        for number, one in status.items()
        if not (name := names.get((recorder, number), "")) or int(number) == newest[name]
    }


def _find_name(recorder: str, number: str) -> None:
    """Find the name of a group in all recorded entries. Rarely called, because a script may create groups all the
    time.
    """
    global _next_search
    began = time.monotonic()
    if began < _next_search:
        return
    names[recorder, number] = ""  # do not search again if its calls are already overwritten
    learn_names(recorder, recorders.read(recorder, collectives=True).get("entries", []))
    now = time.monotonic()
    _next_search = now + (now - began) * _SEARCH_EVERY


def learn_names(recorder: str, entries: list[dict[str, Any]]) -> None:
    """Store the names of groups from recorded entries."""
    for entry in entries:
        names[recorder, str(entry["pg_id"])] = str(entry["process_group"][0])


def describe(status: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return names, ranks and progress of all groups that torch knows."""
    world = getattr(sys.modules.get(WORLD), "_world", None)
    if world is None:
        return []
    found = []
    for group, name in list(world.pg_names.items()):
        backend = next(iter(world.pg_map.get(group, ("",))))
        enqueued, completed = status.get(str(name), (-1, -1))
        found.append(
            {
                "name": str(name),
                "backend": str(backend),
                "ranks": ranks(group),
                "enqueued": enqueued,
                "completed": completed,
                "description": str(getattr(group, "group_desc", "")),
            }
        )
    return found


def ranks(group: Any) -> list[int]:
    """Return the global ranks of a group, in its order."""
    places = sys.modules[WORLD]._world.pg_group_ranks.get(group, {})
    return [int(rank) for rank, _ in sorted(places.items(), key=lambda one: one[1])]


def global_rank(name: str, rank: int) -> int:
    """Return the global rank of a rank of the group with this name."""
    for group, known in list(sys.modules[WORLD]._world.pg_names.items()):
        if str(known) == name:
            members = ranks(group)
            return members[rank] if rank < len(members) else rank
    return rank
