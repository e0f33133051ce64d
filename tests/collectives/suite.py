"""PyTorch's own tests of torch.distributed, from its wheel, on phalanx groups and on gloo.

    python -m tests.collectives.suite --backend shm        all tests; lists failures that are not in EXCEPTIONS
    python -m tests.collectives.suite --backend gloo       the same tests on gloo, for comparison
    python -m tests.collectives.suite --backend shm test_all_reduce_sum test_broadcast
    python -m tests.collectives.suite --places aab         rank 2 claims to be on another host

Tests that check for gloo find gloo, and run on the requested backend. Ranks are forked from one process
that has imported torch, which makes this fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_SKIPS = range(70, 100)  # exit codes of torch's tests if something is missing
_SKIP, _FAIL = 77, 10
_LONG = 120.0  # maximum seconds of one test
_PLACES = "SUITE_PLACES"

# Tests that gloo passes here and shm does not, and why.
EXCEPTIONS: dict[str, str] = {}

# Tests that no backend passes on a machine like this one.
NOBODY = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": "needs GPUs, and does not ask",
    "test_all_to_all_cuda_complex": "needs GPUs, and does not ask",
    "test_all_to_all_full_group_cuda": "needs GPUs, and does not ask",
    "test_batch_isend_irecv_mixed_backend_err": "needs GPUs, and does not ask",
    "test_batch_isend_irecv_op_err": "needs GPUs, and does not ask",
    "test_new_subgroups_with_group_param": "needs 4 ranks, and does not ask",
}

# Tests that shm passes and gloo does not.
NOT_GLOO = {
    "test_all_to_all": "gloo's lists are of one size",
    "test_all_to_all_complex": "gloo's lists are of one size",
    "test_all_to_all_full_group": "gloo's lists are of one size",
}


@dataclass(frozen=True)
class Outcome:
    name: str
    how: str
    seconds: float
    text: str = ""


def load(backend: str, ranks: int) -> Any:
    """Return torch's test module, with the tests that it defines for gloo."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    from torch.testing._internal.distributed import distributed_test as module

    from phalanx.collectives.registration import register

    register()
    module.BACKEND = _Named(backend)
    module.Barrier.sync = classmethod(_sync)
    return module


class _Named(str):
    """The backend's name. It compares equal to "gloo", and a new group gets the backend under test."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _sync(cls: Any, wait_for: int | None = None, timeout: float = 60) -> None:
    """Same as torch's barrier, without its sleep of 0.1 s per call."""
    import torch.distributed as dist

    wait_for = wait_for or dist.get_world_size()
    cls.barrier_id += 1
    folder = Path(os.environ["TEMP_DIR"], "barrier")
    mine = folder / f".{os.getpid()}"
    mine.write_text(str(cls.barrier_id))
    mine.rename(folder / str(os.getpid()))
    until = time.monotonic() + timeout
    while True:
        there = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if sum(int(path.read_text()) >= cls.barrier_id for path in there) == wait_for:
            return
        if time.monotonic() > until:
            raise RuntimeError("barrier timeout")
        time.sleep(0.002)


def names(module: Any) -> list[str]:
    return [name for name in dir(module.DistributedTest._DistTestBase) if name.startswith("test_")]


def run(module: Any, name: str, ranks: int) -> Outcome:
    """Run one test in forked ranks."""
    from torch.testing._internal.common_distributed import cleanup_temp_dir, initialize_temp_directories

    started = time.monotonic()
    initialize_temp_directories()
    module.INIT_METHOD = os.environ["INIT_METHOD"]
    module.Barrier.init()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(ranks)]
        store = Path(folder, "store")
        ends = _ended([_forked(_alone, module, name, 0, store, Path(os.devnull))], 5)
        if ends[0] not in _SKIPS:
            ends = _ended([_forked(_rank, module, name, rank, store, logs[rank]) for rank in range(ranks)])
        text = "".join(f"rank {n}: {end}\n{logs[n].read_text()}" for n, end in enumerate(ends) if logs[n].exists())
    cleanup_temp_dir()
    seconds = time.monotonic() - started
    if all(end in _SKIPS for end in ends):
        return Outcome(name, SKIPPED, seconds)
    if all(end == 0 or end in _SKIPS for end in ends):
        return Outcome(name, PASSED, seconds)
    return Outcome(name, FAILED, seconds, text)


def _forked(work: Any, module: Any, name: str, rank: int, store: Path, log: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = _FAIL
    try:
        to = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(to, 1)
        os.dup2(to, 2)
        code = work(module, name, rank, store)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _FAIL
    except unittest.SkipTest:
        code = _SKIP
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _test(module: Any, name: str, rank: int, store: Path) -> Any:
    class Test(module.TestDistBackend, module.DistributedTest._DistTestBase):
        pass

    test = Test(name)
    test.rank, test.file_name = rank, str(store)
    return test


def _alone(module: Any, name: str, rank: int, store: Path) -> int:
    """Run a test without a group. A test for other machines skips itself before it needs one; any other test fails."""
    getattr(_test(module, name, rank, store), name)()
    return 0


def _rank(module: Any, name: str, rank: int, store: Path) -> int:
    """Do what TestDistBackend._run does."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    from phalanx.collectives import neighbours

    if places := os.environ.get(_PLACES):
        neighbours.host_id = lambda: places[rank]
    test = _test(module, name, rank, store)
    dist.init_process_group(
        init_method=test.init_method,
        backend=module.BACKEND,
        world_size=int(test.world_size),
        rank=rank,
        timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)),
    )
    module.Barrier.sync()
    common_utils.set_rng_seed()
    getattr(test, name)()
    module.Barrier.sync()
    dist.destroy_process_group()
    return 0


def _ended(pids: list[int], limit: float = _LONG) -> list[int]:
    """Return the exit code of each rank. After a failure, the others get only a few more seconds."""
    ends: dict[int, int] = {}
    until = time.monotonic() + limit
    hurried = False
    while len(ends) < len(pids):
        for pid in pids:
            if pid not in ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ends[pid] = os.waitstatus_to_exitcode(status)
        if not hurried and len(pids) > 1 and any(end != 0 and end not in _SKIPS for end in ends.values()):
            hurried, until = True, min(until, time.monotonic() + 3)
        if time.monotonic() > until:
            for pid in set(pids) - set(ends):
                os.kill(pid, signal.SIGKILL)
            until += 60
        time.sleep(0.002)
    return [ends[pid] for pid in pids]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="shm without its native part")
    parser.add_argument("--places", default="", help="a letter for each rank: the machine that it is on, so it says")
    parser.add_argument("--json", help="outcomes, to compare")
    parser.add_argument("--verbose", action="store_true", help="the output of the ranks of a failed test")
    parser.add_argument("tests", nargs="*")
    given = parser.parse_args()
    if given.places:
        given.ranks = len(given.places)
        os.environ[_PLACES] = given.places
    if given.plain:
        sys.modules["phalanx.collectives._native"] = None  # type: ignore[assignment]
    module = load(given.backend, given.ranks)
    outcomes = []
    for name in given.tests or names(module):
        outcome = run(module, name, given.ranks)
        outcomes.append(outcome)
        if outcome.how != SKIPPED or given.tests:
            print(f"{outcome.how:8}{outcome.seconds:6.1f} s  {name}", flush=True)
        if outcome.how == FAILED and given.verbose:
            print(outcome.text, flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps([vars(outcome) for outcome in outcomes]))
    counts = {how: sum(outcome.how == how for outcome in outcomes) for how in (PASSED, SKIPPED, FAILED)}
    known = {**NOBODY, **(NOT_GLOO if given.backend == "gloo" else EXCEPTIONS)}
    wrong = [outcome.name for outcome in outcomes if outcome.how == FAILED and outcome.name not in known]
    print(f"{given.backend}, {given.ranks} ranks: {counts}, {sum(o.seconds for o in outcomes):.0f} s")
    print("\n".join(["not as expected:", *wrong]) if wrong else "as expected")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
