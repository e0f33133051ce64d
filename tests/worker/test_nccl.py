"""How aborts of NCCL groups are counted. A build of torch for the CPU has no NCCL: its backend is replaced."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.worker.process_group import nccl
from phalanx.worker.process_group.closing import destroy_without_waiting
from tests.kit.cli import until


class Backend:
    """Stands for torch's ProcessGroupNCCL; its abort returns when it may."""

    def __init__(self) -> None:
        self.may_return, self.aborts = threading.Event(), 0

    def abort(self) -> None:
        self.aborts += 1
        self.may_return.wait()


class Group:
    """Stands for a process group with such a backend."""

    def __init__(self) -> None:
        self.backend = Backend()

    def _get_backend(self, device: torch.device) -> Backend:
        if device.type != "cuda":
            raise RuntimeError("no backend for this device")
        return self.backend


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Group]]:
    """The groups that were formed, of which torch knows the last one."""
    made: list[Group] = []
    monkeypatch.setattr(nccl, "PATIENCE", 0.2)
    monkeypatch.setattr(nccl, "_aborting", {})
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Backend, raising=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield made
    nccl.forget_groups()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for group in made:
        group.backend.may_return.set()


def form(groups: list[Group]) -> Backend:
    group = Group()
    groups.append(group)
    c10d._world.pg_map[group] = ("nccl", None)  # type: ignore[index, assignment]
    return group.backend


def aborted(backend: Backend) -> None:
    """Abort the groups, and wait for longer than an abort should take."""
    nccl.abort()
    until(lambda: backend.aborts == 1, 10, "the abort to begin")
    time.sleep(nccl.PATIENCE)


def test_an_abort_that_does_not_return_blocks(groups: list[Group]) -> None:
    backend = form(groups)
    assert not nccl.is_blocked()  # nothing is aborted
    nccl.abort()
    assert not nccl.is_blocked()  # it has just begun
    until(nccl.is_blocked, 10, "the abort to be late")
    nccl.abort()  # again: it is not begun twice
    assert nccl.is_blocked()
    assert backend.aborts == 1
    backend.may_return.set()
    until(lambda: not nccl.is_blocked(), 10, "the abort to return")


def test_an_abort_that_returns_does_not_block(groups: list[Group]) -> None:
    backend = form(groups)
    backend.may_return.set()
    aborted(backend)
    assert not nccl.is_blocked()


def test_one_of_two_aborts_is_enough_to_block(groups: list[Group]) -> None:
    first, second = form(groups), form(groups)
    first.may_return.set()
    aborted(second)
    assert nccl.is_blocked()


def test_an_abort_of_a_group_that_was_left_does_not_block(groups: list[Group]) -> None:
    """Nor does it count for the next group, whose own abort has its time."""
    aborted(form(groups))
    assert nccl.is_blocked()
    nccl.forget_groups()
    assert not nccl.is_blocked()
    after = form(groups)
    assert not nccl.is_blocked()
    nccl.abort()
    assert not nccl.is_blocked()
    until(nccl.is_blocked, 10, "the abort of the next group to be late")
    assert after.aborts == 1


def test_an_abort_of_a_group_that_the_script_has_destroyed_does_not_block(groups: list[Group]) -> None:
    aborted(form(groups))
    c10d._world.pg_map.clear()  # as dist.destroy_process_group does
    form(groups)
    assert not nccl.is_blocked()


def test_errors_of_an_abort_are_its_end(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(self: Backend) -> None:
        self.aborts += 1
        raise RuntimeError("NCCL communicator was aborted on rank 0")

    monkeypatch.setattr(Backend, "abort", abort)
    aborted(form(groups))
    assert not nccl.is_blocked()


def test_no_group_is_known_after_a_failure(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the abort returns or not, so that the next group can form."""
    backend = form(groups)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    destroy_without_waiting()
    until(lambda: backend.aborts == 1, 10, "the abort to begin")
    assert not c10d._world.pg_map
    assert not nccl.is_blocked()


def test_kept_groups_do_not_use_up_the_open_files_of_a_script(groups: list[Group]) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 12, hard))
    form(groups)
    nccl.forget_groups()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before - 4, hard)
    form(groups)
    form(groups)
    nccl.forget_groups()
    expected = before + 12 if hard == resource.RLIM_INFINITY else min(before + 12, hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard)
