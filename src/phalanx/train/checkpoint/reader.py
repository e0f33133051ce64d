"""Finds, verifies and loads checkpoints. Every rank makes the same calls in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint import loading, randomness, state
from phalanx.train.checkpoint.format.folder import Folder, Info
from phalanx.train.checkpoint.format.plain import unpacked
from phalanx.train.checkpoint.peers import Peers, by_main

if TYPE_CHECKING:
    import torch


class CheckpointReader:
    """Reads the checkpoints of a folder. `generators`: of this rank, restored with the global ones."""

    def __init__(
        self, folder: Folder, peers: Peers, generators: Sequence[torch.Generator], say: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._peers = peers
        self._generators = generators
        self._say = say
        self.bad: dict[str, list[str]] = {}  # checkpoints that a load found to be corrupted, with the reason

    def latest(self) -> Info | None:
        """Return the newest checkpoint whose files all exist with the right size. `load` also verifies checksums."""
        for name in self._folder.names():
            with contextlib.suppress(CheckpointError):
                return self._folder.info(name)
        return None

    def load(self, kept: Mapping[str, object], info: Info | None = None, *, random: bool = True) -> Info | None:
        """Restore in place from the newest intact checkpoint, or from `info`. Return None if there is none.

        A corrupted checkpoint is reported and skipped; if it was requested with `info`, CheckpointError is raised.
        """
        names = [info.name] if info is not None else by_main(self._peers, self._folder.names)
        for name in names:
            contents, problems = self._checked(name)
            if contents is not None and not problems:
                problems = self._restore(kept, contents, random)
                if not problems:
                    extra = unpacked(contents.values.extra, {})
                    return dataclasses.replace(contents.info, extra=extra)
            if info is None and by_main(self._peers, partial(self._is_gone, name)):
                # A run that is still saving has removed it meanwhile: there is a newer one.
                return self.load(kept, random=random)
            self.bad[name] = problems
            how = "refused" if self._folder.key else "corrupted"
            if info is not None:
                raise CheckpointError(f"the checkpoint {info.path} is {how}", details=problems)
            if self._peers.rank == 0:
                self._say(f"phalanx: checkpoint {name} is {how}, and not used: {'; '.join(problems[:4])}")
        if names:
            raise self._none_left(len(names))
        return None

    def _none_left(self, count: int) -> CheckpointError:
        details = [f"{name}: {problems[0]}" for name, problems in self.bad.items()]
        if not self._folder.key:
            what = f"no intact checkpoint in {self._folder.path}: {count} corrupted"
            return CheckpointError(what, details=details, fix="start in an empty folder")
        return CheckpointError(
            f"no intact checkpoint in {self._folder.path} has a signature of this key: {count} refused",
            details=details,
            fix="use an empty folder, the key that signed them, or start without --checkpoint-key if you trust them",
        )

    def _checked(self, name: str) -> tuple[loading.Contents | None, list[str]]:
        """Check a checkpoint; every rank reads its share of the files, and all get the same answer."""
        contents = None
        problems: list[str] = []
        try:
            signed = bool(self._folder.key)
            contents = loading.contents(self._folder.info(name), self._folder.manifest(name), signed=signed)
            mine = contents.tables[self._peers.rank :: self._peers.world_size]
            problems = loading.differences(contents.path, mine, signed=signed)
        except CheckpointError as error:
            problems = [error.what]
        except OSError as error:
            problems = [f"{name}: {error.strerror}: {error.filename}"]
        return contents, self._all_problems(problems)

    def _restore(self, kept: Mapping[str, object], contents: loading.Contents, random: bool) -> list[str]:
        """Restore in place. Raises if something does not match; returns what cannot be read, the same on all ranks."""
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
                problems = self._all_problems(self._restore_random(contents))
        return problems

    def _restore_random(self, contents: loading.Contents) -> list[str]:
        try:
            randomness.restore([table.random for table in contents.tables], self._peers.rank, self._generators)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            return [f"{contents.info.name}: random state: {type(error).__name__}: {error}"]
        return []

    def _all_problems(self, mine: list[str]) -> list[str]:
        return list(dict.fromkeys(problem for found in self._peers.gather(mine, all=True) for problem in found))

    def _is_gone(self, name: str) -> bool:
        return not os.path.isdir(os.path.join(self._folder.path, name))
