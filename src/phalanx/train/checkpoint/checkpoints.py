"""The checkpoints of a run.

    checkpoints = Checkpoints("runs/a/checkpoints", run, keep_last=2, keep_best=1)
    checkpoints.load({"model": model, "opt": opt})                      # the newest good one, if there is one
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
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from phalanx.errors import OptionError
from phalanx.train.checkpoint import loading, randomness, state
from phalanx.train.checkpoint.buffer import Buffer
from phalanx.train.checkpoint.fault import CheckpointError
from phalanx.train.checkpoint.folder import Folder, Info
from phalanx.train.checkpoint.keeping import Keeping
from phalanx.train.checkpoint.manifest import Values
from phalanx.train.checkpoint.peers import Alone, Peers
from phalanx.train.checkpoint.plain import Tensors, packed, unpacked
from phalanx.train.checkpoint.saver import Order, Save
from phalanx.train.checkpoint.shares import share

_LAST_WORDS = 10.0  # seconds that a close after an error gives a save that is under way


class Checkpoints:
    """Saves, finds and loads. `busy` is what a save does while `buffers` earlier ones are still being written."""

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
        say: Callable[[str], None] | None = None,
    ) -> None:
        if busy not in ("wait", "skip"):
            raise OptionError(
                f'busy="{busy}": a save that finds others under way can "wait" or "skip"', fix='busy="wait"'
            )
        if buffers < 1:
            raise OptionError(f"buffers={buffers}: at least one is needed", fix="buffers=2")
        self._folder = Folder(os.fspath(folder))
        self._peers: Peers = peers if peers is not None else Alone()
        self._keeping = Keeping(keep_last, keep_best, best, mode)
        self._busy = busy
        self._patience = patience
        self._say = say if say is not None else _say
        self._free = [Buffer() for _ in range(buffers)]
        self._saves: deque[Save] = deque()
        # A thread that is there already: to start one takes longer than to copy a small state. It is joined at the
        # exit of Python, so a script that ends without a word still leaves what it had begun to save.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._token = ""
        self._number = 0
        self.bad: dict[str, list[str]] = {}  # checkpoints that a load found not to be what was written, and why

    @property
    def folder(self) -> str:
        return self._folder.path

    # -- saving

    def save(
        self,
        step: int,
        kept: Mapping[str, object],
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Copy the state and let it be written. False if it was skipped. Raises what went wrong with an earlier one."""
        self._open()
        self._settle()
        if not self._free:
            if self._busy == "skip":
                return False
            self._finish(self._saves.popleft())
        found = state.taken(kept)
        aside: Tensors = {}
        more = packed(dict(extra or {}), "extra", aside)
        if aside:
            raise CheckpointError(
                f"extra holds tensors: {', '.join(aside)}", fix="put numbers there, or keep the tensors"
            )
        numbers: dict[str, float | None] = {name: float(value) for name, value in (metrics or {}).items()}
        chunks = share(found.tensors, self._peers.rank, self._peers.world_size, frozenset(found.own))
        buffer = self._free.pop()
        self._number += 1
        order = Order(
            self._folder,
            self._folder.staging(step, self._token, self._number),
            self._peers.rank,
            self._peers.world_size,
            Values(step, found.plain, more),
            numbers,
            randomness.taken(),
            self._keeping,
            frozenset(self.bad),
            self._patience,
        )
        save = Save(order, buffer, buffer.take(chunks))
        save.start(self._writer)
        self._saves.append(save)
        return True

    def wait(self) -> None:
        """Until everything that was saved is on the disk. Raises what went wrong."""
        while self._saves:
            self._finish(self._saves.popleft())

    def close(self, *, broken: bool = False) -> None:
        """Wait, and give everything back. `broken`: after an error on this rank, when others may not answer."""
        try:
            if not broken:
                self.wait()
        finally:
            for save in self._saves:
                save.join(_LAST_WORDS)
                save.give_up.set()
                save.join()
                self._free.append(save.buffer)
            self._saves.clear()
            self._writer.shutdown()
            for buffer in self._free:
                buffer.close()
            self._folder.close()
            self._token = ""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(broken=kind is not None)

    def _open(self) -> None:
        """Once, before the first save: rank 0 takes the folder, all see that it is the same one."""
        if self._token:
            return
        answer: dict[str, Any] = {}
        if self._peers.rank == 0:
            try:
                answer = {"token": self._folder.lock()}
                self._folder.sweep(answer["token"])
            except CheckpointError as error:
                answer = {"what": error.what, "fix": error.fix}
        answer = self._peers.broadcast(answer)
        if "token" not in answer:
            raise CheckpointError(answer["what"], fix=answer["fix"])
        seen = self._peers.gather(self._folder.token() == answer["token"], all=True)
        if not all(seen):
            blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
            raise CheckpointError(
                f"the folder for checkpoints is not the same for all ranks: {self._folder.path}",
                details=[f"what rank 0 writes there is not seen by rank {', '.join(blind[:8])}"],
                fix="choose a folder on a disk that all nodes share",
            )
        self._token = answer["token"]

    def _settle(self) -> None:
        """Finish the saves that are done everywhere: one small exchange, for all ranks must see the same."""
        if not self._saves:
            return
        done = 0
        for save in self._saves:
            if save.under_way:
                break
            done += 1
        for _ in range(min(self._peers.gather(done, all=True))):
            self._finish(self._saves.popleft())

    def _finish(self, save: Save) -> None:
        save.written.wait()
        failures = self._peers.gather(save.failure, all=True)
        if any(failures):
            save.give_up.set()
        save.join()
        outcome = self._peers.broadcast(save.outcome)
        self._free.append(save.buffer)
        if not outcome:
            return
        if self._peers.rank == 0:
            # Nobody writes there any more.
            shutil.rmtree(save.order.staging, ignore_errors=True)
        told = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
        raise CheckpointError(
            f"the checkpoint of step {save.order.values.step} was not written",
            details=[f"in {self._folder.path}", *(told[:8] or [outcome])],
            fix="see to the disk; what was saved before it is untouched",
        )

    # -- finding and loading

    def latest(self) -> Info | None:
        """The newest whose files are all there, with all their bytes. Whether each byte is right, `load` checks."""
        for name in self._folder.names():
            with contextlib.suppress(CheckpointError):
                return self._folder.info(name)
        return None

    def load(self, kept: Mapping[str, object], info: Info | None = None, *, random: bool = True) -> Info | None:
        """Restore in place from the newest good one, or from this one. None if there is none to restore from.

        One that is not what was written is named and passed over; the one that was asked for by `info` is refused.
        """
        self.wait()
        names = self._peers.broadcast([info.name] if info is not None else self._folder.names())
        for name in names:
            contents, problems = self._checked(name)
            if contents is not None and not problems:
                return self._restore(kept, name, contents, random)
            self.bad[name] = problems
            if info is not None:
                raise CheckpointError(f"the checkpoint {info.path} is not what was written", details=problems)
            if self._peers.rank == 0:
                self._say(
                    f"phalanx: checkpoint {name} is not used, it is not what was written: {'; '.join(problems[:4])}"
                )
        if names:
            raise CheckpointError(
                f"none of the {len(names)} checkpoints in {self._folder.path} is what was written",
                details=[f"{name}: {problems[0]}" for name, problems in self.bad.items()],
                fix="start in an empty folder",
            )
        return None

    def _checked(self, name: str) -> tuple[loading.Contents | None, list[str]]:
        """Every rank reads its share of the files; all come to the same answer."""
        contents = None
        problems: list[str] = []
        path = os.path.join(self._folder.path, name)
        try:
            contents = loading.contents(path, self._folder.manifest(name))
            mine = contents.tables[self._peers.rank :: self._peers.world_size]
            problems = loading.differences(path, mine)
        except CheckpointError as error:
            problems = [error.what]
        except OSError as error:
            problems = [f"{name}: {error.strerror}: {error.filename}"]
        told = [problem for found in self._peers.gather(problems, all=True) for problem in found]
        return contents, list(dict.fromkeys(told))

    def _restore(self, kept: Mapping[str, object], name: str, contents: loading.Contents, random: bool) -> Info:
        values = contents.values
        targets = state.targets(kept, values.plain, contents.shapes)
        loading.read(contents, targets)
        state.restore(kept, values.plain, targets)
        if random and self._peers.rank < len(contents.tables):
            randomness.restore(contents.tables[self._peers.rank].random)
        return dataclasses.replace(self._folder.info(name), extra=unpacked(values.extra, {}))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
