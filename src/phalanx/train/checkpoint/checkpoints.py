"""The checkpoints of a run.

    checkpoints = Checkpoints("runs/a/checkpoints", run, keep_last=2, keep_best=1)
    checkpoints.load({"model": model, "opt": opt})                      # the newest intact one, if there is one
    checkpoints.save(step, {"model": model, "opt": opt}, metrics={"loss": loss})   # returns after one copy in memory
    checkpoints.close()

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from phalanx.errors import CheckpointError, OptionError
from phalanx.train.checkpoint import loading, randomness, state
from phalanx.train.checkpoint.buffer import Buffer
from phalanx.train.checkpoint.folder import Folder, Info
from phalanx.train.checkpoint.manifest import Values
from phalanx.train.checkpoint.peers import Peers, SingleRank
from phalanx.train.checkpoint.plain import Tensors, packed, unpacked
from phalanx.train.checkpoint.retention import Retention
from phalanx.train.checkpoint.saver import Save, SaveRequest
from phalanx.train.checkpoint.shares import share

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_CLOSE_PATIENCE = 10.0  # seconds for saves that are under way, in a close after an error
_NICE = 10  # added to the niceness of the writing thread


class Checkpoints:
    """Saves, finds and loads checkpoints.

    busy      what a save does while `buffers` earlier ones are still being written: "wait" or "skip"
    patience  seconds for the slowest rank to write its share
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        peers: Peers | None = None,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        best: str = "loss",
        mode: str = "min",
        busy: Literal["wait", "skip"] = "wait",
        buffers: int = 2,
        patience: float = 600.0,
        generators: Sequence[torch.Generator] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        if busy not in ("wait", "skip"):
            raise OptionError(f'busy="{busy}": expected "wait" or "skip"', fix='busy="wait"')
        if buffers < 1:
            raise OptionError(f"buffers={buffers}: at least one is needed", fix="buffers=2")
        self._folder = Folder(os.fspath(folder))
        self._peers: Peers = peers if peers is not None else SingleRank()
        self._keeping = Retention(keep_last, keep_best, best, mode)
        self._busy = busy
        self._patience = patience
        self._generators = generators  # of this rank, beside the global ones of torch, Python and NumPy
        self._say = say if say is not None else _say
        self._free = [Buffer() for _ in range(buffers)]
        self._saves: deque[Save] = deque()
        # A permanent thread: starting one takes longer than copying a small state. Python joins it at exit, so a
        # script that ends without closing still completes its saves.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=lower_priority)
        self._pid = os.getpid()
        self._token = ""
        self._number = 0
        self._failure: CheckpointError | None = None  # of the newest save that has ended
        self._unranked = False  # the message that the metric for `keep_best` is missing was printed
        self.bad: dict[str, list[str]] = {}  # checkpoints that a load found to be corrupted, and why

    @property
    def folder(self) -> str:
        """The path of the folder."""
        return self._folder.path

    def open(self) -> None:
        """Lock the folder on rank 0, and check that all ranks see the same one. The first save calls it too."""
        if os.getpid() != self._pid:
            raise CheckpointError(
                "these checkpoints belong to the parent of this process", fix="make a new Checkpoints here"
            )
        if self._token:
            return
        token = self._by_main(self._folder.lock)
        seen = self._peers.gather(self._folder.token() == token, all=True)
        if not all(seen):
            self._folder.close()
            blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
            raise CheckpointError(
                f"not all ranks see the same folder for checkpoints: {self._folder.path}",
                details=[f"what rank 0 writes is not visible to rank {', '.join(blind[:8])}"],
                fix="choose a folder on a file system that all nodes share",
            )
        self._token = token

    # -- saving

    def save(
        self,
        step: int,
        kept: Mapping[str, object],
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Copy the state, and write it in the background. Return False if it was skipped.

        A save that fails is reported and does not end the training. If the newest one has failed, `wait` and `close`
        raise its error.
        """
        self.open()
        self._settle()
        if not self._free:
            if self._busy == "skip":
                return False
            self._finish()
        found = state.taken(kept)
        aside: Tensors = {}
        more = packed(dict(extra or {}), "extra", aside)
        if aside:
            raise CheckpointError(
                f"extra holds tensors: {', '.join(aside)}", fix="put numbers there, or keep the tensors"
            )
        numbers: dict[str, float | None] = {name: float(value) for name, value in (metrics or {}).items()}
        self._look_for_best(numbers)
        chunks = share(found.tensors, self._peers.rank, self._peers.world_size, frozenset(found.own))
        buffer = self._free[-1]
        self._number += 1
        order = SaveRequest(
            self._folder,
            self._folder.staging(step, self._token, self._number),
            self._peers.rank,
            self._peers.world_size,
            Values(step, found.plain, more),
            numbers,
            randomness.taken(self._generators),
            self._keeping,
            frozenset(self.bad),
            self._patience,
        )
        save = Save(order, buffer, buffer.take(chunks))
        self._saves.append(save)
        self._free.pop()
        save.start(self._writer)
        return True

    @property
    def under_way(self) -> int:
        """How many saves this rank is still writing."""
        return sum(save.under_way for save in self._saves)

    def wait(self) -> None:
        """Wait until all saves are on the disk. Raises if the newest one has failed."""
        while self._saves:
            self._finish(tell=len(self._saves) > 1)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, broken: bool = False, patience: float = _CLOSE_PATIENCE, needless: bool = False) -> None:
        """Wait for all saves, and release the folder and the memory.

        broken    after an error on this rank: other ranks may not answer
        patience  seconds for other ranks to write; 0 if one of them is known to be dead
        needless  what this rank has not written yet need not be written
        """
        if os.getpid() != self._pid:
            return  # a fork has no writing thread
        try:
            if not broken:
                self.wait()
        finally:
            limit = time.monotonic() + patience
            for save in self._saves if needless else ():
                save.needless.set()
            for save in self._saves:
                save.written.wait()
                save.join(max(0.0, limit - time.monotonic()))
                save.give_up.set()
            self._writer.shutdown()
            self._free += [save.buffer for save in self._saves]
            self._saves.clear()
            for buffer in self._free:
                buffer.close()
            self._folder.close()
            self._token = ""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(broken=kind is not None)

    def _settle(self) -> None:
        """Conclude the saves that are complete on all ranks, with one small exchange."""
        if not self._saves:
            return
        done = [[save.failure, save.outcome] for save in takewhile(lambda save: not save.under_way, self._saves)]
        told = self._peers.gather(done, all=True)
        for place, save in enumerate(self._saves):
            if any(one[place][0] for one in told if len(one) > place):
                save.give_up.set()  # on a full disk the rank may not even have been able to write why
        for ended in zip(*told, strict=False):  # those that are complete everywhere
            self._conclude([failure for failure, _ in ended], ended[0][1])

    def _finish(self, *, tell: bool = True) -> None:
        """Wait for the oldest save. It stays in the queue until all ranks have answered, as one of them may be dead."""
        save = self._saves[0]
        save.written.wait()
        failures = self._peers.gather(save.failure, all=True)
        if any(failures):
            save.give_up.set()
        save.join()
        self._conclude(failures, self._peers.broadcast(save.outcome), tell=tell)

    def _conclude(self, failures: Sequence[str], outcome: str, *, tell: bool = True) -> None:
        save = self._saves.popleft()
        self._free.append(save.buffer)
        self._failure = None
        if not outcome:
            return
        if self._peers.rank == 0:
            # No rank writes there any more.
            shutil.rmtree(save.order.staging, ignore_errors=True)
        told = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
        self._failure = CheckpointError(
            f"the checkpoint of step {save.order.values.step} was not written",
            details=[f"in {self._folder.path}", *(told[:8] or [outcome])],
            fix="check the disk; earlier checkpoints are not affected",
        )
        if tell and self._peers.rank == 0:
            self._say(f"phalanx: {self._failure}")

    def _look_for_best(self, metrics: Mapping[str, float | None]) -> None:
        if self._keeping.best and self._keeping.metric not in metrics and not self._unranked:
            self._unranked = True
            if self._peers.rank == 0:
                known = ", ".join(metrics) or "none"
                self._say(
                    f'phalanx: a checkpoint without the metric "{self._keeping.metric}" is never among the best '
                    f"{self._keeping.best}; metrics given: {known}"
                )

    # -- finding and loading

    def latest(self) -> Info | None:
        """Return the newest checkpoint whose files all exist with the right size. `load` also verifies checksums."""
        for name in self._folder.names():
            with contextlib.suppress(CheckpointError):
                return self._folder.info(name)
        return None

    def latest_step(self) -> int:
        """Return the step of the newest checkpoint; -1: there is none."""
        info = self.latest()
        return -1 if info is None else info.step

    def load(self, kept: Mapping[str, object], info: Info | None = None, *, random: bool = True) -> Info | None:
        """Restore in place from the newest intact checkpoint, or from `info`. Return None if there is none.

        A corrupted checkpoint is reported and skipped; if it was asked for with `info`, CheckpointError is raised.
        """
        while self._saves:
            self._finish()
        names = [info.name] if info is not None else self._by_main(self._folder.names)
        for name in names:
            contents, problems = self._checked(name)
            if contents is not None and not problems:
                problems = self._restore(kept, contents, random)
                if not problems:
                    extra = unpacked(contents.values.extra, {})
                    return dataclasses.replace(contents.info, extra=extra)
            if info is None and self._by_main(partial(self._is_gone, name)):
                # A run that is still saving has removed it in the meantime: there is a newer one.
                return self.load(kept, random=random)
            self.bad[name] = problems
            if info is not None:
                raise CheckpointError(f"the checkpoint {info.path} is corrupted", details=problems)
            if self._peers.rank == 0:
                self._say(f"phalanx: checkpoint {name} is corrupted, and not used: {'; '.join(problems[:4])}")
        if names:
            raise CheckpointError(
                f"no intact checkpoint in {self._folder.path}: {len(names)} corrupted",
                details=[f"{name}: {problems[0]}" for name, problems in self.bad.items()],
                fix="start in an empty folder",
            )
        return None

    def _checked(self, name: str) -> tuple[loading.Contents | None, list[str]]:
        """Check a checkpoint; every rank reads its share of the files, and all get the same answer."""
        contents = None
        problems: list[str] = []
        try:
            contents = loading.contents(self._folder.info(name), self._folder.manifest(name))
            mine = contents.tables[self._peers.rank :: self._peers.world_size]
            problems = loading.differences(contents.path, mine)
        except CheckpointError as error:
            problems = [error.what]
        except OSError as error:
            problems = [f"{name}: {error.strerror}: {error.filename}"]
        return contents, self._all_problems(problems)

    def _restore(self, kept: Mapping[str, object], contents: loading.Contents, random: bool) -> list[str]:
        """Restore in place. Raises if something does not fit; returns what cannot be read, the same on all ranks."""
        plain = contents.values.plain
        targets = state.targets(kept, plain, contents.shapes)
        problems: list[str] = []
        try:
            loading.read(contents, targets)
        except CheckpointError as error:
            problems = [error.what]
        except OSError as error:
            problems = [f"{contents.info.name}: {error.strerror}: {error.filename}"]
        problems = self._all_problems(problems)
        if not problems:
            state.restore(kept, plain, targets)
            if random:
                randomness.restore([table.random for table in contents.tables], self._peers.rank, self._generators)
        return problems

    def _all_problems(self, mine: list[str]) -> list[str]:
        return list(dict.fromkeys(problem for found in self._peers.gather(mine, all=True) for problem in found))

    def _is_gone(self, name: str) -> bool:
        return not os.path.isdir(os.path.join(self._folder.path, name))

    def _by_main(self, call: Callable[[], T]) -> T:
        """Call on rank 0; return the result, or raise its error, on every rank."""
        told: dict[str, Any] = {}
        if self._peers.rank == 0:
            try:
                told = {"got": call()}
            except CheckpointError as error:
                told = {"what": error.what, "fix": error.fix}
        told = self._peers.broadcast(told)
        if "what" in told:
            raise CheckpointError(told["what"], fix=told["fix"])
        return told["got"]  # type: ignore[no-any-return]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lower_priority() -> None:
    """Lower the priority of this thread only: on Linux each thread has its own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
