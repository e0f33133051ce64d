"""The report of a worker when the agent requests it, or when an exception ends the script: stacks, groups and
collectives.
"""

from __future__ import annotations

import json
import os
import time
from types import FrameType, TracebackType
from typing import Any

from .. import log
from . import stacks
from .collectives import current_call, group_progress, recorders
from .collectives.collective_history import CollectiveHistory
from .collectives.recorded_calls import dtype_names, is_inner, newest, number_of, operation_name, timed_calls, to_call

MAX_BYTES = 256 * 1024  # bytes per report

launcher_store = ("", "")  # host and port of the store as set by the launcher


def full(still: float = 0.0) -> dict[str, Any]:
    """Return stacks of all threads, groups with their ranks, and the newest calls with their sites.

    `still`: seconds since the main thread last moved.
    """
    found: dict[str, Any] = {"threads": stacks.threads(), "groups": [], "calls": [], **_store()}
    try:
        _add_collectives(found, still)
    except Exception as error:  # another version of torch, or groups being destroyed: stacks alone are evidence, too
        log.swallowed("forkserver.probe.report")
        found["why"] = f"torch's records cannot be read: {error!r}"[:200]
    return _bounded(found)


def of_exception(trace: TracebackType | None) -> dict[str, Any]:
    """Return the same report when an exception ends the script, with the main thread where the exception was raised."""
    found = full()
    where: list[FrameType] = []  # innermost first, like the lines of a stack
    lines: list[tuple[str, int, str]] = []
    while trace is not None:
        where.insert(0, trace.tb_frame)
        lines = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name), *lines]
        trace = trace.tb_next
    for thread in found["threads"]:
        if thread["main"]:
            thread["frames"] = lines
    now = next((current_call.find(frame) for frame in where if current_call.is_operation(frame)), {})
    if now.get("op") in current_call.UNRECORDED:
        site = lines[: current_call.MAX_FRAMES]
        found["calls"].append({"seq": 0, "outputs": [], "done": False, "age": 0.0, "site": site, **now})
    return found


def remember_store() -> None:
    """Store the store's address before the script runs, because the script may change it."""
    global launcher_store
    launcher_store = _address()


def _store() -> dict[str, Any]:
    """Return the address that this rank uses for the store, if the script has changed it."""
    own = _address()
    if own == launcher_store or not all(launcher_store):
        return {}
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {"store": ":".join(own), "given": ":".join(launcher_store), "hosts": not agents}


def _address() -> tuple[str, str]:
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


def _add_collectives(found: dict[str, Any], still: float) -> None:
    now = time.time_ns()
    calls: list[tuple[int, dict[str, Any]]] = []
    status: dict[str, tuple[int, int]] = {}
    history = CollectiveHistory(operation_name, dtype_names, group_progress.global_rank)
    for recorder in recorders.RECORDERS if recorders.is_initialized() else ():
        answer = recorders.read_with_sites(recorder)
        group_progress.learn_names(recorder, answer.get("entries", []))
        known = {str(number): one for number, one in answer.get("pg_status", {}).items()}
        current = group_progress.current_only(recorder, known)
        for number, one in current.items():
            name = group_progress.names.get((recorder, number), "")
            counts = int(one.get("last_enqueued_collective", -1)), int(one.get("last_completed_collective", -1))
            status[name] = max(counts, status.get(name, counts))
        past = known.keys() - current
        entries = [each for each in answer.get("entries", []) if str(each["pg_id"]) not in past and not is_inner(each)]
        timed = timed_calls(entries)
        calls += [
            (int(entry["time_created_ns"]), to_call(entry, now, timed=(entry["pg_id"], number_of(entry)) in timed))
            for entry in newest(entries)
        ]
        try:
            history.add(entries)
        except Exception:  # another version of torch: the newest calls alone are evidence, too
            log.swallowed("forkserver.probe.report")
    calls.sort(key=lambda one: one[0])
    found["groups"] = group_progress.describe(status)
    found["calls"] = [call for _, call in calls]
    found["history"] = history.to_dict()
    current_call.add_unrecorded(found["calls"], still)


def _bounded(found: dict[str, Any]) -> dict[str, Any]:
    """Shorten a report. The newest calls and the main thread matter most. The history has its own limit."""
    history = found.pop("history", {})
    while len(json.dumps(found)) > MAX_BYTES and (found["calls"] or found["threads"]):
        sited = [call for call in found["calls"] if call["done"] and call["site"]]
        for call in sited:
            call["site"] = []
        if not sited and len(found["calls"]) > 1:
            found["calls"] = found["calls"][len(found["calls"]) // 2 :]
        elif not sited:
            found["threads"] = found["threads"][: len(found["threads"]) // 2]
            found["groups"] = found["groups"][:64]
    return {**found, "history": history}
