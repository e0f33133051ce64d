"""What torch's flight recorders report about groups and calls."""

from __future__ import annotations

import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from phalanx.forkserver.probe import report
from phalanx.forkserver.probe.collectives import group_progress, recorders


def test_group_names_are_looked_up_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(recorder: str, *, collectives: bool) -> dict[str, Any]:
        if collectives:
            asked.append(recorder)
            time.sleep(0.001)
        status = {"last_enqueued_collective": 1, "last_completed_collective": 1}
        return {"pg_status": {str(number): status for number in range(len(asked), len(asked) + 20)}, "entries": []}

    monkeypatch.setattr(recorders, "read", ask)
    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(group_progress, "names", {})
    monkeypatch.setattr(group_progress, "_next_search", 0.0)
    for _ in range(50):
        assert len(group_progress.progress()) == 20 * len(recorders.RECORDERS)
    assert len(asked) < 5


def test_a_new_group_replaces_the_lost_one_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was pending in the lost group stays pending forever, and says nothing about the new group."""
    status = {
        "0": {"last_enqueued_collective": 312, "last_completed_collective": 311},
        "1": {"last_enqueued_collective": 7, "last_completed_collective": 7},
        "2": {"last_enqueued_collective": 309, "last_completed_collective": 308},
    }
    names = {"0": "0", "1": "1", "2": "0"}
    entries = [
        {
            "pg_id": int(number),
            "process_group": [name, ""],
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": status[number]["last_enqueued_collective"],
            "time_created_ns": 1,
            "retired": False,
        }
        for number, name in names.items()
    ]

    def ask(which: str, *, collectives: bool) -> dict[str, Any]:
        return {"pg_status": status, "entries": entries if collectives else []} if which == "fr" else {}

    monkeypatch.setattr(recorders, "read", ask)
    monkeypatch.setattr(recorders, "read_with_sites", lambda which: ask(which, collectives=True))
    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(group_progress, "names", {})
    monkeypatch.setattr(group_progress, "_next_search", 0.0)
    assert sorted((group["name"], group["enqueued"]) for group in group_progress.progress()) == [("0", 309), ("1", 7)]
    assert sorted((call["group"], call["seq"]) for call in report.full()["calls"]) == [
        ("0", 309),
        ("1", 7),
    ]


def test_unstarted_kernels_are_known_where_torch_times_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for coalesced collectives and messages, and not if torch records the start only with the end."""

    def entry(seq: int, start: int | None, end: int | None, **more: Any) -> dict[str, Any]:
        return {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": seq,
            "time_created_ns": seq,
            "time_discovered_started_ns": start,
            "time_discovered_completed_ns": end,
            "retired": end is not None,
            **more,
        }

    def started(*entries: dict[str, Any]) -> list[bool | None]:
        answer = {"pg_status": {}, "entries": list(entries)}
        monkeypatch.setattr(recorders, "read_with_sites", lambda which: answer if which == "nccl" else {})
        return [call["started"] for call in report.full()["calls"]]

    monkeypatch.setattr(recorders, "is_initialized", lambda: True)
    monkeypatch.setattr(group_progress, "names", {})
    assert started(entry(1, 5, 9), entry(2, 7, None), entry(3, None, None)) == [True, True, False]
    assert started(entry(1, None, 9), entry(2, None, None)) == [None, None]
    assert started(entry(1, 9, 9), entry(2, None, None)) == [None, None]
    message = entry(3, None, None, is_p2p=True, profiling_name="nccl:send")
    assert started(entry(1, 5, 9), entry(2, None, None), entry(2, None, None), message) == [True, None, None, None]


def test_another_thread_finds_the_compiler_while_calls_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._inductor", types.SimpleNamespace(config="of the compiler"))
    with recorders.without_compiler():
        standin = torch.__dict__["_inductor"]
        assert standin.codecache.PyCodeCache.stack_frames_for_code("x") is None
        with ThreadPoolExecutor(1) as another:
            assert another.submit(lambda: standin.config).result() == "of the compiler"
    assert "_inductor" not in torch.__dict__
