"""What torch knows of this process: how far each group is, the newest collectives, what the main thread waits in.

From torch's flight recorders, one for NCCL and one for all others. They have a lock of their own that is never held by
one who waits for Python's, so that they can be asked while a collective hangs. Groups of ours they do not see: those
have a journal, which has no lock at all.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from .. import linux, paths
from . import stacks
from .collective_history import CollectiveHistory

LARGEST = 256 * 1024  # bytes of an answer
_EACH = 40  # calls of a group
_DEEP = 24  # frames of a call

_C10D = "torch._C._distributed_c10d"
_WORLD = "torch.distributed.distributed_c10d"
_FILE = "torch/distributed/distributed_c10d.py"
_RECORDERS = ("fr", "nccl", "phalanx")
_QUIET = 0.25  # seconds: NCCL's watchdog looks ten times a second
_SELDOM = 400  # times as long as it took, before all that is recorded is read again for the names of groups

# As the recorder calls them -> as torch does
_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}

# Of torch.distributed: what waits and is not recorded, and which of its variables tells for whom
_UNRECORDED = {
    "send": "group_dst",
    "recv": "group_src",
    "monitored_barrier": "",
    "init_process_group": "",
    "new_group": "",
}

given = ("", "")  # host and port of the store, by the launcher
_known: dict[tuple[str, str], str] = {}  # recorder, its number of a group -> the group's name
_rests = 0.0  # until when that is not done


def groups() -> list[dict[str, Any]]:
    """How far each group is. Cheap: asked ten times a second."""
    if not _begun():
        return []
    found = []
    for recorder in _RECORDERS:
        status = _ask(recorder, collectives=False).get("pg_status", {})
        for number, one in status.items():
            if "name" in one:
                _known[recorder, number] = str(one["name"])
            # What was recorded by others than NCCL can be read at any time.
            elif recorder != "nccl" and (recorder, number) not in _known:
                _meet(recorder, number)
        for number, one in _present_day(recorder, status).items():
            found.append(
                {
                    "id": number,
                    "name": _known.get((recorder, number), ""),
                    "nccl": recorder == "nccl",
                    "enqueued": int(one.get("last_enqueued_collective", -1)),
                    "completed": int(one.get("last_completed_collective", -1)),
                }
            )
    return found


def _present_day(recorder: str, status: dict[str, Any]) -> dict[str, Any]:
    """Without groups that are no more: one that forms anew has the name of the one before, and a higher number. What
    was pending when that was lost stays so for ever."""
    newest: dict[str, int] = {}
    for number in status:
        name = _known.get((recorder, number), "")
        newest[name] = max(int(number), newest.get(name, -1))
    return {
        number: one
        for number, one in status.items()
        if not (name := _known.get((recorder, number), "")) or int(number) == newest[name]
    }


def _meet(recorder: str, number: str) -> None:
    """The name of a group, from all that is recorded: seldom enough for a script that makes new groups all the time."""
    global _rests
    began = time.monotonic()
    if began < _rests:
        return
    _known[recorder, number] = ""  # if its calls are forgotten already, they are not looked for again
    _learn(recorder, _ask(recorder, collectives=True).get("entries", []))
    now = time.monotonic()
    _rests = now + (now - began) * _SELDOM


def everything(still: float = 0.0) -> dict[str, Any]:
    """When the agent asks: stacks of all threads, groups with their ranks, the newest calls with their sites.

    `still` seconds has the main thread been where it is.
    """
    found: dict[str, Any] = {"threads": stacks.threads(), "groups": [], "calls": [], **_store()}
    try:
        _tell(found, still)
    except Exception as error:  # of another torch, or of groups that are taken down: stacks are evidence too
        found["why"] = f"torch's records cannot be read: {error!r}"[:200]
    return _bounded(found)


def _store() -> dict[str, Any]:
    """Where this rank looks for the store, if the script has set that to something else than the launcher."""
    own = _address()
    if own == given or not all(given):
        return {}
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {"store": ":".join(own), "given": ":".join(given), "hosts": not agents}


def _address() -> tuple[str, str]:
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


def begin() -> None:
    """Before the script: it may change what the launcher has set."""
    global given
    given = _address()


def _tell(found: dict[str, Any], still: float) -> None:
    now = time.time_ns()
    calls: list[tuple[int, dict[str, Any]]] = []
    status: dict[str, tuple[int, int]] = {}
    history = CollectiveHistory(_named, _dtypes, _global)
    for recorder in _RECORDERS if _begun() else ():
        answer = _entries(recorder)
        _learn(recorder, answer.get("entries", []))
        known = {str(number): one for number, one in answer.get("pg_status", {}).items()}
        today = _present_day(recorder, known)
        for number, one in today.items():
            name = _known.get((recorder, number), "")
            told = int(one.get("last_enqueued_collective", -1)), int(one.get("last_completed_collective", -1))
            status[name] = max(told, status.get(name, told))
        past = known.keys() - today
        entries = [each for each in answer.get("entries", []) if str(each["pg_id"]) not in past and not _inner(each)]
        timed = _timed(entries)
        calls += [
            (int(entry["time_created_ns"]), _call(entry, now, timed=(entry["pg_id"], _number(entry)) in timed))
            for entry in _newest(entries)
        ]
        with contextlib.suppress(Exception):  # of another torch: the newest calls are evidence too
            history.add(entries)
    calls.sort(key=lambda one: one[0])
    found["groups"] = _groups(status)
    found["calls"] = [call for _, call in calls]
    found["history"] = history.told()
    _present(found["calls"], still)


def raised(trace: TracebackType | None) -> dict[str, Any]:
    """When an exception ends the script: the same, with the main thread where it was raised."""
    found = everything()
    where: list[FrameType] = []  # the innermost first, like the lines of a stack
    lines: list[tuple[str, int, str]] = []
    while trace is not None:
        where.insert(0, trace.tb_frame)
        lines = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name), *lines]
        trace = trace.tb_next
    for thread in found["threads"]:
        if thread["main"]:
            thread["frames"] = lines
    now = next((present(frame) for frame in where if _operation(frame)), {})
    if now.get("op") in _UNRECORDED:
        found["calls"].append({"seq": 0, "outputs": [], "done": False, "age": 0.0, "site": lines[:_DEEP], **now})
    return found


def _operation(frame: FrameType) -> bool:
    return frame.f_code.co_name in _WAITING and frame.f_code.co_filename.endswith(_FILE)


def present(frame: FrameType | None) -> dict[str, Any]:
    """The operation of torch.distributed that this thread is in, from its own variables; empty: none."""
    while frame is not None:
        if _operation(frame):
            with contextlib.suppress(Exception):  # it moves on while we look
                return {"op": frame.f_code.co_name, **_variables(frame)}
        frame = frame.f_back
    return {}


def pending() -> dict[str, Any]:
    """The newest collective that is not over, of those that anybody but NCCL does; empty: none."""
    entries = [each for recorder in ("fr", "phalanx") for each in _ask(recorder, collectives=True).get("entries", [])]
    waiting = [entry for entry in entries if not entry.get("retired") and not _inner(entry)]
    if not waiting:
        return {}
    call = _call(max(waiting, key=lambda entry: int(entry["time_created_ns"])), time.time_ns())
    return {name: call[name] for name in ("op", "group", "seq", "dtypes", "shapes", "peer", "tag", "reduction")}


# -- asking the recorders


def _begun() -> bool:
    """A module that is being imported has not all of its names yet."""
    module = sys.modules.get(_WORLD)
    group = getattr(module, "GroupMember", None)
    return getattr(group, "WORLD", None) is not None


def _ask(recorder: str, *, collectives: bool) -> dict[str, Any]:
    if recorder == "phalanx":
        return _journal(collectives=collectives)
    dump = getattr(sys.modules.get(_C10D), f"_dump_{recorder}_trace_json", None)
    if dump is None:
        return {}
    found = json.loads(dump(includeCollectives=collectives))
    return found if isinstance(found, dict) else {}


def _journal(*, collectives: bool) -> dict[str, Any]:
    """Of groups that phalanx makes: without a copy, and with sites."""
    journal: Any = sys.modules.get(paths.FLIGHT_RECORDER)
    if not hasattr(journal, "entries"):  # not there, or about to be imported
        return {}
    return {"pg_status": journal.status(), "entries": journal.entries() if collectives else []}


def _entries(recorder: str) -> dict[str, Any]:
    """Calls with their sites: a pickle of what this very process has recorded, made and read in it."""
    if recorder == "phalanx":
        return _journal(collectives=True)
    dump = getattr(sys.modules.get(_C10D), f"_dump_{recorder}_trace", None)
    if dump is None:
        return {}
    if recorder == "nccl":
        if not _ask(recorder, collectives=False).get("pg_status"):  # CUDA may not even be begun, and is not to be
            return {}
        linux.let_captures_be()
        if not _stands():
            return _ask(recorder, collectives=False)
    try:
        with _no_compiler():
            text = dump(includeCollectives=True, includeStackTraces=True)
        found = _Plain(io.BytesIO(text)).load()
    except Exception:
        return _ask(recorder, collectives=True)
    return found if isinstance(found, dict) else {}


class _NoCompiler:
    """For one thread; whoever else looks for torch._inductor just then gets it."""

    def __init__(self) -> None:
        self._thread = _thread.get_ident()

    def __getattr__(self, name: str) -> Any:
        if _thread.get_ident() != self._thread:
            return getattr(importlib.import_module("torch._inductor"), name)
        if name == "codecache":
            return SimpleNamespace(PyCodeCache=SimpleNamespace(stack_frames_for_code=lambda *_: None))
        raise AttributeError(name)


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """To name a frame, torch asks torch._inductor whether it is of code that it has made: and imports it for that, for
    seconds. Where it was not imported there is no such code, and this stands in for it."""
    torch = sys.modules["torch"]
    if "_inductor" in torch.__dict__:
        yield
        return
    standin = _NoCompiler()
    torch.__dict__["_inductor"] = standin
    try:
        yield
    finally:
        if torch.__dict__.get("_inductor") is standin:
            del torch.__dict__["_inductor"]


def _stands() -> bool:
    """NCCL's recorder asks CUDA about events that its watchdog may take away: safe while nothing completes."""
    before = _ask("nccl", collectives=False).get("pg_status")
    time.sleep(_QUIET)
    return before == _ask("nccl", collectives=False).get("pg_status")


class _Plain(pickle.Unpickler):
    """Lists, dicts, texts and numbers, which torch marks with functions that give them back as they are."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle":
            return lambda value, *_: value
        raise pickle.UnpicklingError(f"{module}.{name}")


# -- what they say, in our words


def _inner(entry: dict[str, Any]) -> bool:
    """What a group of ours does its work with has no name, and is not what the script has called."""
    return not entry["process_group"][0] and paths.FLIGHT_RECORDER in sys.modules


def _learn(recorder: str, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        _known[recorder, str(entry["pg_id"])] = str(entry["process_group"][0])


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts: dict[Any, int] = {}
    chosen = []
    for entry in reversed(entries):
        count = counts[entry["pg_id"]] = counts.get(entry["pg_id"], 0) + 1
        if count <= _EACH:
            chosen.append(entry)
    return chosen[::-1]


def _call(entry: dict[str, Any], now: int, *, timed: bool = False) -> dict[str, Any]:
    """`timed`: the recorder says when a kernel has started (TORCH_NCCL_ENABLE_TIMING)."""
    backend, _, text = entry["profiling_name"].rpartition(":")
    op, _, ends = text.partition(" ")  # "nccl:send 0->1"
    group = str(entry["process_group"][0])
    peer, root = entry.get("peer"), entry.get("root")
    if peer is not None:
        peer = _global(group, peer) if peer >= 0 else None  # from anyone
    elif entry.get("is_p2p") and ends:
        numbers = ends.replace("<-", "->").split("->")
        peer = _global(group, int(numbers[1])) if len(numbers) == 2 and numbers[1].isdigit() else None
    site = [[one["filename"], one["line"], one["name"]] for one in entry.get("frames", [])[:_DEEP]]
    return {
        "group": group,
        "seq": _number(entry),
        "op": _named(site, op),
        "dtypes": _dtypes(entry.get("input_dtypes") or entry.get("output_dtypes") or []),
        "shapes": [list(shape) for shape in entry.get("input_sizes", [])][:8],
        "outputs": [list(shape) for shape in entry.get("output_sizes", [])][:8],
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
        "age": round(max(0, now - int(entry["time_created_ns"])) / 1e9, 3),
        "site": site,
        "peer": peer,
        "tag": entry.get("tag"),
        "reduction": entry.get("reduction", ""),
        "root": None if root is None else _global(group, root),
        "backend": backend,
        "started": bool(entry.get("time_discovered_started_ns")) if timed else None,
    }


def _timed(entries: list[dict[str, Any]]) -> set[tuple[Any, int]]:
    """Collectives of which it is known whether their kernel has started: all, where torch times them, but not the parts
    of a coalesced block. Where it does not, a start is unknown, or noted with the end."""
    times = [(entry.get("time_discovered_started_ns"), entry.get("time_discovered_completed_ns")) for entry in entries]
    if not any(start and start != end for start, end in times):
        return set()
    counts: dict[tuple[Any, int], int] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            key = entry["pg_id"], _number(entry)
            counts[key] = counts.get(key, 0) + 1
    return {key for key, count in counts.items() if count == 1}


def _number(entry: dict[str, Any]) -> int:
    return 0 if entry.get("is_p2p") else int(entry["collective_seq_id"])


def _called(site: list[list[Any]]) -> str:
    """By its own name: gloo records a reduce_scatter as the all_reduce that it is made of."""
    return next((name for file, _, name in site if file.endswith(_FILE) and name in _WAITING), "")


def _named(site: list[list[Any]], op: str) -> str:
    return _called(site) or _OPS.get(op, op.lower())


def _dtypes(names: list[str]) -> list[str]:
    return list(dict.fromkeys(_DTYPES.get(name, name.lower()) for name in names))


def _groups(status: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    world = getattr(sys.modules.get(_WORLD), "_world", None)
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
                "ranks": _ranks(group),
                "enqueued": enqueued,
                "completed": completed,
                "description": str(getattr(group, "group_desc", "")),
            }
        )
    return found


def _ranks(group: Any) -> list[int]:
    """Global ones, in the order of the group."""
    ranks = sys.modules[_WORLD]._world.pg_group_ranks.get(group, {})
    return [int(rank) for rank, _ in sorted(ranks.items(), key=lambda one: one[1])]


def _global(name: str, rank: int) -> int:
    for group, known in list(sys.modules[_WORLD]._world.pg_names.items()):
        if str(known) == name:
            ranks = _ranks(group)
            return ranks[rank] if rank < len(ranks) else rank
    return rank


# -- what the main thread waits in


def _present(calls: list[dict[str, Any]], still: float) -> None:
    """Some operations are not recorded; of others the variables tell more than the record."""
    frame = stacks.main()
    now = present(frame)
    if not now:
        return
    if now["op"] not in _UNRECORDED or any(call["op"] == now["op"] and not call["done"] for call in calls):
        waiting = [call for call in calls if not call["done"] and call["group"] == now["group"]]
        if waiting and now["reduction"]:
            waiting[-1]["reduction"] = now["reduction"]
        return
    calls.append(
        {
            "seq": 0,
            "outputs": [],
            "done": False,
            "age": round(still, 3),
            "site": stacks.frames(frame, _DEEP),
            **now,
        }
    )


_WAITING = frozenset(
    (
        *_UNRECORDED,
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather"),
        *("scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
        *("all_to_all", "barrier", "all_reduce_coalesced", "all_gather_coalesced"),
    )
)


def _variables(frame: FrameType) -> dict[str, Any]:
    """Of a function of torch.distributed, whose names are torch's: nothing of the user's is looked at."""
    names = frame.f_locals
    world = sys.modules[_WORLD]
    group = names.get("group") or getattr(getattr(world, "GroupMember", None), "WORLD", None)
    whom = _UNRECORDED.get(frame.f_code.co_name, "")
    tensor: Any = next(
        (names[name] for name in ("tensor", "input_tensor", "input") if hasattr(names.get(name), "dtype")), None
    )
    peer = names.get(whom)
    if peer is not None:
        ranks = _ranks(group)
        peer = ranks[peer] if 0 <= peer < len(ranks) else peer
    elif whom:
        peer = names.get(whom.removeprefix("group_"))
    tag = names.get("tag") if whom else None
    reduction = getattr(names.get("op"), "op", names.get("op"))
    return {
        "group": str(world._world.pg_names.get(group, "")) if group is not None else "",
        "dtypes": [str(tensor.dtype).removeprefix("torch.")] if tensor is not None else [],
        "shapes": [[int(size) for size in tensor.shape]] if tensor is not None else [],
        "peer": peer if isinstance(peer, int) else None,
        "tag": tag if isinstance(tag, int) else None,
        "reduction": str(getattr(reduction, "name", "") or ""),
    }


# -- how much of it


def _bounded(found: dict[str, Any]) -> dict[str, Any]:
    """The newest calls and the main thread matter most. The history has a limit of its own."""
    history = found.pop("history", {})
    while len(json.dumps(found)) > LARGEST and (found["calls"] or found["threads"]):
        sited = [call for call in found["calls"] if call["done"] and call["site"]]
        for call in sited:
            call["site"] = []
        if not sited and len(found["calls"]) > 1:
            found["calls"] = found["calls"][len(found["calls"]) // 2 :]
        elif not sited:
            found["threads"] = found["threads"][: len(found["threads"]) // 2]
            found["groups"] = found["groups"][:64]
    return {**found, "history": history}
