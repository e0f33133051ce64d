"""Files of a checkpoint, with valid sizes and checksums: anyone who changes a file can compute them."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint import Checkpoints
from phalanx.train.checkpoint.format import integrity
from phalanx.train.checkpoint.format.manifest import MANIFEST, STATE, Manifest, Table, Values, table_file
from phalanx.train.checkpoint.format.validation import check_manifest, check_tables, check_values
from tests.fuzz.campaign import Check
from tests.fuzz.mutation import altered, mutated

KINDS: dict[str, Any] = {MANIFEST: Manifest, STATE: Values, table_file(0): Table}
KEY = b"k" * 64


@contextlib.contextmanager
def opened() -> Iterator[Check]:
    """Save a checkpoint, and yield the check of one change to it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        model = nn.Linear(3, 2)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(
                1, {"model": model, "other": nn.BatchNorm1d(2)}, {"epoch": 1, "seen": (1, 2)}, {"loss": 0.5}
            )
            checkpoints.wait()
        (saved,) = Path(folder).glob("step-*")
        bodies = {name: (saved / name).read_bytes() for name in KINDS}
    yield lambda chance, note: check(bodies, chance, note)


def check(bodies: dict[str, bytes], chance: random.Random, note: Callable[[object], None]) -> None:
    """Change one of the files, and read all of them as a load does."""
    name = chance.choice([*KINDS])
    if chance.random() < 0.3:
        changed = mutated(bodies[name], chance)
    else:
        body = msgspec.json.decode(bodies[name])["body"]
        try:
            raw = msgspec.json.encode(altered(body, chance))
        except (OverflowError, TypeError, RecursionError, UnicodeEncodeError):
            return
        changed = msgspec.json.encode({"checksum": integrity.checksum(raw), "body": msgspec.Raw(raw)})
    note((name, changed))
    texts = {**bodies, name: changed}
    with contextlib.suppress(CheckpointError):
        manifest = integrity.opened(texts[MANIFEST], Manifest, MANIFEST)
        table = integrity.opened(texts[table_file(0)], Table, table_file(0))
        values = integrity.opened(texts[STATE], Values, STATE)
        check_manifest(manifest)
        check_tables(manifest, [table])
        check_values(values.plain, values.extra, [table])
        sizes = {entry.name: entry.size for entry in manifest.files}
        elements = sum(torch.Size(piece.sizes).numel() for piece in table.pieces)
        assert elements <= max(sizes.values(), default=0), "more elements than the files have bytes"
    try:
        integrity.opened(changed, KINDS[name], name, KEY)
    except CheckpointError:
        pass
    else:
        raise AssertionError("a file without a signature was accepted")
