"""One save in the background: each rank writes its share; rank 0 waits for all of them and commits.

The ranks communicate through the folder only: a thread must not use the collectives of the training.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint import randomness
from phalanx.train.checkpoint.format import integrity, tensorfile
from phalanx.train.checkpoint.format.buffer import Buffer, Placed
from phalanx.train.checkpoint.format.folder import Folder
from phalanx.train.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    Entry,
    Manifest,
    Piece,
    Table,
    Values,
    failure_file,
    table_file,
    tensor_file,
)
from phalanx.train.checkpoint.format.plain import tensor_names
from phalanx.train.checkpoint.retention import Retention
from phalanx.train.checkpoint.shares import Chunk
from phalanx.version import __version__

logger = logging.getLogger(__name__)

REMOVED = "the folder of the save was removed"  # by rank 0, if it could not write its share, or by another process


@dataclass(frozen=True)
class SaveRequest:
    """A save without its bytes."""

    folder: Folder
    staging: str
    rank: int
    world_size: int
    values: Values
    metrics: dict[str, float | None]
    random: dict[str, Any]  # of this rank, not packed yet
    keeping: Retention
    bad: frozenset[str]  # checkpoints that are known to be corrupted
    patience: float  # seconds for the slowest rank, after rank 0 has written


class Save:
    """A save. `written` is set when the share of this rank is on disk; rank 0 then waits for the others."""

    def __init__(self, order: SaveRequest, buffer: Buffer, placed: Sequence[Placed]) -> None:
        self.order = order
        self.buffer = buffer
        self.written = threading.Event()
        self.give_up = threading.Event()
        self.needless = threading.Event()  # data that is not on disk yet need not be written
        self.failure = ""  # this rank's own
        self.outcome = ""  # of rank 0: why there is no checkpoint
        self._placed = placed
        self._ended = threading.Event()

    def start(self, writer: Executor) -> None:
        """Write in a thread of `writer`."""
        writer.submit(self._run)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended; return whether it has."""
        return self._ended.wait(timeout)

    @property
    def under_way(self) -> bool:
        """Whether the save has not ended."""
        return not self._ended.is_set()

    def _run(self) -> None:
        try:
            self._write()
        finally:
            self._ended.set()

    def _write(self) -> None:
        order = self.order
        try:
            _write_share(order, self.buffer, self._placed, self.needless)
        except Exception as error:
            logger.debug("writing the share of rank %d", order.rank, exc_info=True)
            self.failure = _reason(error, order.staging)
            # Remove the share first, to make room for the file with the reason.
            for name in (tensor_file(order.rank), f"{table_file(order.rank)}.part"):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(order.staging, name))
            with contextlib.suppress(OSError), open(f"{order.staging}/{failure_file(order.rank)}", "w") as file:
                file.write(self.failure)
        finally:
            self._placed = ()
            self.written.set()
        if order.rank == 0:
            try:
                tables = _gathered(order, self.give_up)
                _commit(order, tables)
            except Exception as error:
                logger.debug("committing a checkpoint", exc_info=True)
                self.outcome = self.failure or _reason(error, order.staging)
                shutil.rmtree(order.staging, ignore_errors=True)


def _reason(error: Exception, staging: str) -> str:
    """Return why a share was not written, without the name of the staging folder, which contains the step."""
    if isinstance(error, OSError) and error.strerror:
        file = os.path.relpath(error.filename, staging) if _inside(error.filename, staging) else error.filename
        if isinstance(error, FileNotFoundError) and file != error.filename:
            return REMOVED
        return f"{error.strerror}{f': {file}' if file and file != '.' else ''}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _inside(path: object, folder: str) -> bool:
    return isinstance(path, str) and (path == folder or path.startswith(f"{folder}/"))


def _write_share(order: SaveRequest, buffer: Buffer, placed: Sequence[Placed], needless: threading.Event) -> None:
    def look() -> None:
        if needless.is_set():
            raise CheckpointError("it was given up: the state is in memory, and the group forms again")

    buffer.ready()
    os.makedirs(order.staging, exist_ok=True)
    file = tensor_file(order.rank)
    names = _unique([item.chunk.name for item in placed])
    entries = tensorfile.entries(zip(names, (item.chunk.part for item in placed), strict=True))
    notes = {"format": "pt", "step": str(order.values.step), "rank": str(order.rank)}
    header = tensorfile.header(entries, notes)
    pieces: list[Piece] = []
    end = len(header)
    key = order.folder.key
    digest = hashlib.sha256(header) if key else None
    fd = os.open(f"{order.staging}/{file}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        integrity.write_all(fd, memoryview(header))
        for item in placed:
            look()
            data = buffer.view(item.begin, item.end)
            begin, end = end, end + len(data)
            pieces.append(piece_of(item.chunk, begin, end, integrity.checksum(data)))
            integrity.write_all(fd, data)
            if digest is not None:
                digest.update(data)
        look()
        os.fsync(fd)
    finally:
        os.close(fd)
    table = Table(
        order.rank,
        file,
        end,
        len(header),
        integrity.checksum(header),
        pieces,
        randomness.packed(order.random),
        digest.hexdigest() if digest is not None else "",
    )
    if order.rank == 0:
        integrity.write_durably(f"{order.staging}/{STATE}", integrity.sealed(order.values, key))
    integrity.write_durably(f"{order.staging}/{table_file(order.rank)}", integrity.sealed(table, key))


def piece_of(chunk: Chunk, begin: int, end: int, checksum: int) -> Piece:
    """Return the entry of a chunk in a table."""
    return Piece(
        chunk.name,
        tensorfile.dtype_name(chunk.part.dtype),
        list(chunk.shape),
        list(chunk.offsets),
        list(chunk.part.shape),
        begin,
        end,
        checksum,
    )


def _unique(names: Sequence[str]) -> list[str]:
    """Return unique names: a rank may have several boxes of one tensor."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


# -- rank 0


def _gathered(order: SaveRequest, give_up: threading.Event) -> dict[str, bytes]:
    """Wait for the tables of all ranks, and return them as they are on disk."""
    wanted = {table_file(rank) for rank in range(order.world_size)}
    failures = {failure_file(rank): rank for rank in range(order.world_size)}
    limit = time.monotonic() + order.patience
    pause = 0.001
    while True:
        # List the folder: a network file system may cache for long that a name does not exist.
        there = set(os.listdir(order.staging))
        for name in sorted(there & set(failures)):
            with open(f"{order.staging}/{name}") as file:
                raise CheckpointError(f"rank {failures[name]}: {file.read() or 'could not write'}")
        if wanted <= there:
            break
        if give_up.is_set():
            raise CheckpointError("another rank could not write its share")
        if time.monotonic() > limit:
            missing = sorted(wanted - there)
            raise CheckpointError(f"{order.patience:.0f} s after rank 0 there is no {', '.join(missing[:5])}")
        give_up.wait(pause)
        pause = min(pause * 2, 0.1)
    found = {}
    for name in sorted(wanted):
        with open(f"{order.staging}/{name}", "rb") as opened:
            found[name] = opened.read()
    return found


def _commit(order: SaveRequest, tables: dict[str, bytes]) -> None:
    key = order.folder.key  # with it, rank 0 signs only data that other ranks have signed
    decoded = [integrity.opened(data, Table, name, key) for name, data in tables.items()]
    _check_whole(order, decoded)
    with open(f"{order.staging}/{STATE}", "rb") as file:
        state = file.read()
    if key:
        integrity.opened(state, Values, STATE, key)
    files = [_entry(name, data, signed=bool(key)) for name, data in {STATE: state, **tables}.items()]
    files += [Entry(table.file, table.size) for table in decoded]
    torch_version = str(torch.__version__)
    step = order.values.step
    manifest = Manifest(FORMAT, step, order.world_size, time.time(), __version__, torch_version, order.metrics, files)
    integrity.write_durably(f"{order.staging}/{MANIFEST}", integrity.sealed(manifest, key))
    order.folder.commit(order.staging, step)
    # An old checkpoint that cannot be removed is not a failure.
    with contextlib.suppress(OSError, CheckpointError):
        _prune(order)


def _entry(name: str, data: bytes, *, signed: bool) -> Entry:
    return Entry(name, len(data), integrity.checksum(data), integrity.digest(data) if signed else "")


def _check_whole(order: SaveRequest, tables: Sequence[Table]) -> None:
    """Raise if the shares of all ranks are not the whole state, which otherwise only a load would detect."""
    written: dict[str, int] = {}
    whole: dict[str, int] = {}
    for table in tables:
        for piece in table.pieces:
            written[piece.name] = written.get(piece.name, 0) + math.prod(piece.sizes)
            whole[piece.name] = math.prod(piece.shape)
    wanted = tensor_names(order.values.plain)
    holes = [name for name in sorted(whole) if written[name] != whole[name]]
    missing = sorted(wanted - set(whole))
    if holes or missing:
        raise CheckpointError(
            "the shares of all ranks are not the whole state",
            details=[f"{name}: {written[name]:,} of {whole[name]:,} elements" for name in holes[:5]]
            + [f"{name}: not written by any rank" for name in missing[:5]],
            fix="keep the same objects on every rank",
        )


def _prune(order: SaveRequest) -> None:
    good, bad = order.folder.sorted_out(order.bad)
    for name in order.keeping.surplus(good, bad):
        with contextlib.suppress(OSError):
            order.folder.remove(name)
