"""The calls of phalanx's groups, as the diagnosis reads them."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.collectives import flight_recorder, registration
from phalanx.forkserver.debug import group_timeouts
from phalanx.forkserver.probe import report
from phalanx.forkserver.probe.collectives import group_progress, recorded_calls, recorders


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same state as in a worker that phalanx started."""
    module: Any = types.ModuleType("_phalanx_forkserver.probe.probe")
    module.current = object()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flight_recorder, "_recorders", weakref.WeakValueDictionary())


class Under:
    """A pending operation."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.finished = False

    def done(self) -> bool:
        return self.finished


def reduces(own: flight_recorder.FlightRecorder, tensor: torch.Tensor) -> Any:
    """Record an all_reduce. The frames are those of a group, called by torch, called by a script."""
    return own.record("all_reduce", [tensor], [tensor], reduction="SUM")


def all_reduce(own: flight_recorder.FlightRecorder, tensor: torch.Tensor) -> Any:
    return reduces(own, tensor)


def progress(own: flight_recorder.FlightRecorder) -> tuple[int, int]:
    status = flight_recorder.status()[str(own.number)]
    return status["last_enqueued_collective"], status["last_completed_collective"]


def test_collectives_are_numbered_and_messages_are_not(watched: None) -> None:
    own = flight_recorder.FlightRecorder(lambda: "0", (0, 1))
    all_reduce(own, torch.ones(3)).done = True
    own.record("send", [torch.ones(2, dtype=torch.int64)], [], peer=1, tag=5)
    all_reduce(own, torch.ones(2, 2))
    assert progress(own) == (2, 1)
    first, message, last = flight_recorder.entries()
    assert [(each["collective_seq_id"], each["retired"]) for each in (first, last)] == [(1, True), (2, False)]
    assert (message["is_p2p"], message["peer"], message["tag"], message["input_dtypes"]) == (True, 1, 5, ["int64"])
    assert (last["input_sizes"], last["output_sizes"], last["reduction"]) == ([[2, 2]], [[2, 2]], "SUM")
    own.close()
    assert flight_recorder.status() == {}


def test_an_async_call_is_over_when_its_work_is(watched: None) -> None:
    own = flight_recorder.FlightRecorder(lambda: "0")
    under = Under()
    all_reduce(own, torch.ones(3)).pending = under
    assert progress(own) == (1, 0)
    under.finished = True
    assert progress(own) == (1, 1)


def test_no_tensor_is_kept_for_longer_than_it_is_used(watched: None) -> None:
    own = flight_recorder.FlightRecorder(lambda: "0")
    kept: list[Any] = []
    for _ in range(3):
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        under = Under(tensor)
        all_reduce(own, tensor).pending = under
    assert progress(own) == (3, 2)  # work without a reference cannot be awaited
    del tensor, under
    gc.collect()
    assert all(each() is None for each in kept)
    assert progress(own) == (3, 3)


def test_a_site_is_where_the_call_was_made(watched: None) -> None:
    own = flight_recorder.FlightRecorder(lambda: "0")
    all_reduce(own, torch.ones(1)).done = True
    line = sys._getframe().f_lineno - 1
    sites = [[(each["name"], each["line"]) for each in entry["frames"]] for entry in flight_recorder.entries()]
    # The frames are those of the caller, not of the group.
    assert sites[0][1] == (test_a_site_is_where_the_call_was_made.__name__, line)
    assert sites[0][0][0] == "all_reduce"


def test_who_waits_in_a_call_shows_all_of_its_stack(watched: None) -> None:
    own = flight_recorder.FlightRecorder(lambda: "0")
    inside, go_on = threading.Event(), threading.Event()

    def engine(tensor: torch.Tensor) -> None:
        entry = own.record("all_reduce", [tensor], [tensor])
        inside.set()
        go_on.wait(60)
        entry.done = True

    def deep(levels: int) -> None:
        deep(levels - 1) if levels else group(torch.ones(1))

    def group(tensor: torch.Tensor) -> None:
        engine(tensor)

    thread = threading.Thread(target=deep, args=(10,))
    thread.start()
    try:
        assert inside.wait(60)
        (waiting,) = flight_recorder.entries()
        assert [each["name"] for each in waiting["frames"]][:12] == ["group", *["deep"] * 11]
    finally:
        go_on.set()
        thread.join()
    (done,) = flight_recorder.entries()
    assert [each["name"] for each in done["frames"]] == ["group", *["deep"] * 4]


def test_without_a_probe_calls_are_only_counted() -> None:
    own = flight_recorder.FlightRecorder(lambda: "0")
    entry = all_reduce(own, torch.ones(3))
    entry.done = True
    entry.pending = Under()
    assert own.enqueued == 1
    assert own.entries() == []


def test_it_is_read_while_others_write(watched: None) -> None:
    own = flight_recorder.FlightRecorder(lambda: "0")
    over = False

    def write() -> None:
        while not over:
            all_reduce(own, torch.ones(1)).done = True

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            called, completed = progress(own)
            assert called >= completed - 3
            flight_recorder.entries()
    finally:
        over = True
        for thread in threads:
            thread.join()
    numbers = [each["collective_seq_id"] for each in flight_recorder.entries()]
    assert len(set(numbers)) == len(numbers)
    assert own.enqueued >= len(numbers)


def test_the_probe_asks_it_as_a_recorder(watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(recorders, "RECORDERS", ("phalanx",))
    monkeypatch.setattr(group_progress, "names", {})
    lost, own = flight_recorder.FlightRecorder(lambda: "0"), flight_recorder.FlightRecorder(lambda: "0")
    all_reduce(lost, torch.ones(3))
    all_reduce(own, torch.ones(3)).done = True
    all_reduce(own, torch.ones(4, dtype=torch.bfloat16))
    assert [(each["name"], each["enqueued"], each["completed"]) for each in group_progress.progress()] == [("0", 2, 1)]
    pending = recorded_calls.pending()
    assert (pending["op"], pending["group"], pending["seq"], pending["shapes"]) == ("all_reduce", "0", 2, [[4]])
    done, waiting = report.full()["calls"]
    assert (done["done"], waiting["done"], waiting["dtypes"], waiting["reduction"]) == (
        True,
        False,
        ["bfloat16"],
        "SUM",
    )


def test_timeouts_of_groups_are_suspended_during_a_debugger_session() -> None:
    registration.register()
    store = dist.HashStore()
    dist.init_process_group("shm", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group: Any = dist.group.WORLD
        group_timeouts.suspend()
        assert group.timeout_seconds == group_timeouts.LONG.total_seconds()
        group_timeouts.resume()
        assert group.timeout_seconds == 7
    finally:
        dist.destroy_process_group()
