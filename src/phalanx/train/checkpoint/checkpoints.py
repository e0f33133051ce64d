"""The checkpoints of a run.

    checkpoints = Checkpoints("runs/a/checkpoints", run, keep_last=2, keep_best=1)
    checkpoints.load({"model": model, "opt": opt})                      # the newest intact one, if there is one
    checkpoints.save(step, {"model": model, "opt": opt}, metrics={"loss": loss})   # returns after one copy in memory
    checkpoints.close()

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from phalanx.errors import CheckpointError, OptionError
from phalanx.train.checkpoint import randomness, state
from phalanx.train.checkpoint.format.folder import Folder, Info
from phalanx.train.checkpoint.format.manifest import Values
from phalanx.train.checkpoint.format.plain import Tensors, packed
from phalanx.train.checkpoint.peers import Peers, SingleRank, by_main
from phalanx.train.checkpoint.reader import CheckpointReader
from phalanx.train.checkpoint.retention import Retention
from phalanx.train.checkpoint.save_queue import SaveQueue
from phalanx.train.checkpoint.saved_metrics import SavedMetrics
from phalanx.train.checkpoint.saver import SaveRequest
from phalanx.train.checkpoint.shares import share

if TYPE_CHECKING:
    import torch

_CLOSE_PATIENCE = 10.0  # seconds for saves in progress, when closing after an error


class Checkpoints:
    """Saves, finds and loads checkpoints.

    busy      what a save does while `buffers` earlier ones are still being written: "wait" or "skip"
    patience  seconds for the slowest rank to write its share
    key       signs checkpoints; those without its signature are rejected. The same on all ranks
    required  raise an error if the folder is not writable, instead of reporting it
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
        required: bool = True,
        say: Callable[[str], None] | None = None,
        key: bytes = b"",
    ) -> None:
        if busy not in ("wait", "skip"):
            raise OptionError(f'busy="{busy}": expected "wait" or "skip"', fix='busy="wait"')
        if buffers < 1:
            raise OptionError(f"buffers={buffers}: at least one is needed", fix="buffers=2")
        self._folder = Folder(os.fspath(folder), key)
        self._peers: Peers = peers if peers is not None else SingleRank()
        self._keeping = Retention(keep_last, keep_best, best, mode)
        self._busy = busy
        self._patience = patience
        self._required = required
        self.refused: CheckpointError | None = None  # why the folder cannot be used
        self._generators = generators  # of this rank, besides the global ones of torch, Python and NumPy
        self._say = say if say is not None else _say
        self._queue = SaveQueue(self._peers, self._folder.path, buffers, self._say)
        self._reader = CheckpointReader(self._folder, self._peers, generators, self._say)
        self._pid = os.getpid()
        self._token = ""
        self._number = 0
        self._metrics = SavedMetrics(self._folder, self._keeping)  # used on rank 0

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
        token = by_main(self._peers, self._folder.lock)
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

    def ready(self) -> bool:
        """Open the folder. If that fails, raise if it is required; otherwise report it and return False."""
        try:
            self.open()
        except CheckpointError as error:
            if self._required or os.getpid() != self._pid:
                raise
            if self._peers.rank == 0 and (self.refused is None or self.refused.what != error.what):
                self._say(f"phalanx: {error.what}; the training continues, and tries again at the next checkpoint")
            self.refused = error
            return False
        self.refused = None
        return True

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
        if not self.ready():
            return False
        self._queue.settle()
        if not self._queue.free:
            if self._busy == "skip":
                return False
            self._queue.finish_oldest()
        found = state.taken(kept)
        aside: Tensors = {}
        more = packed(dict(extra or {}), "extra", aside)
        if aside:
            raise CheckpointError(
                f"extra holds tensors: {', '.join(aside)}", fix="put numbers there, or keep the tensors"
            )
        numbers: dict[str, float | None] = {name: float(value) for name, value in (metrics or {}).items()}
        if self._peers.rank == 0:
            self._metrics.add(numbers)
        chunks = share(found.tensors, self._peers.rank, self._peers.world_size, frozenset(found.own))
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
        self._queue.start(order, chunks)
        return True

    @property
    def under_way(self) -> int:
        """Number of saves that this rank is still writing."""
        return self._queue.under_way

    def wait(self) -> None:
        """Wait until all saves are on the disk. Raises if the newest one has failed."""
        self._queue.wait()

    def finish_all(self) -> None:
        """Wait until all saves are on the disk, and report those that have failed."""
        self._queue.finish_all()

    def make_room(self) -> bool:
        """If the disk has less free space than the newest checkpoint needs, remove older ones that the next one
        replaces.

        Return whether a retry makes sense.
        """
        removed: list[str] = by_main(self._peers, self._make_room) if self.refused is None else []
        if removed and self._peers.rank == 0:
            self._say(f"phalanx: removed {', '.join(removed)} from {self.folder}, to make room for the last checkpoint")
        return bool(removed)

    def _make_room(self) -> list[str]:
        good, bad = self._folder.sorted_out(self.bad)
        if not good or self._folder.free() >= self._folder.size(good[0].name):
            return []
        names = self._keeping.replaceable(good, bad)
        for name in names:
            with contextlib.suppress(OSError):
                self._folder.remove(name)
        return names

    def close(self, *, broken: bool = False, patience: float = _CLOSE_PATIENCE, needless: bool = False) -> None:
        """Wait for all saves, and release the folder and the memory.

        broken    after an error on this rank: other ranks may not answer
        patience  seconds for other ranks to write; 0 if one of them is known to be dead
        needless  data that this rank has not written yet need not be written
        """
        if os.getpid() != self._pid:
            return  # a fork has no writing thread
        try:
            if not broken:
                self.wait()
                if self._number and self._peers.rank == 0 and (missing := self._metrics.missing()):
                    self._say(f"phalanx: {missing}")
        finally:
            self._queue.close(patience, needless=needless)
            self._folder.close()
            self._token = ""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(broken=kind is not None)

    @property
    def best_metric(self) -> str | None:
        """The metric that selects the best checkpoints; None: only the last ones are kept."""
        return self._keeping.metric if self._keeping.best else None

    def is_best(self, value: float) -> bool:
        """Return whether a checkpoint with this value of `best_metric` would be among the best. For rank 0."""
        return self._metrics.is_best(value)

    # -- finding and loading

    @property
    def bad(self) -> Mapping[str, Sequence[str]]:
        """Checkpoints that a load found to be corrupted, with the reason."""
        return self._reader.bad

    def latest(self) -> Info | None:
        """Return the newest checkpoint whose files all exist with the right size. `load` also verifies checksums."""
        return self._reader.latest()

    def latest_step(self) -> int:
        """Return the step of the newest checkpoint; -1: there is none."""
        info = self.latest()
        return -1 if info is None else info.step

    def load(self, kept: Mapping[str, object], info: Info | None = None, *, random: bool = True) -> Info | None:
        """Restore in place from the newest intact checkpoint, or from `info`. Return None if there is none.

        A corrupted checkpoint is reported and skipped; if it was requested with `info`, CheckpointError is raised.
        """
        self._queue.finish_all()
        return self._reader.load(kept, info, random=random)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
