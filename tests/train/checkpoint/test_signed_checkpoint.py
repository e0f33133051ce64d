"""Checkpoints that are signed with a key: write access to the folder is not enough to have a state loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from phalanx.contract.checkpoint_key import read_key
from phalanx.errors import OptionError
from phalanx.train.checkpoint import CheckpointError, Checkpoints
from phalanx.train.checkpoint.format import integrity
from phalanx.train.checkpoint.format.manifest import MANIFEST, STATE, Manifest, Table, Values, table_file

KEY, OTHER = b"k" * 64, b"o" * 64
TABLE, TENSORS = table_file(0), "rank-00000.safetensors"


def saved(folder: Path, *steps: int, key: bytes = KEY) -> nn.Linear:
    model = nn.Linear(3, 2)
    with Checkpoints(folder, key=key, keep_last=10) as checkpoints:
        for step in steps:
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoints.save(step, {"model": model})
        checkpoints.wait()
    return model


def loaded(folder: Path, key: bytes) -> tuple[int, float, list[str]]:
    """Return the loaded step, a weight, and the messages."""
    messages: list[str] = []
    model = nn.Linear(3, 2)
    info = Checkpoints(folder, key=key, say=messages.append).load({"model": model})
    return info.step if info else -1, float(model.weight[0, 0].item()), messages


def resealed(folder: Path, name: str, kind: type, key: bytes = b"", **changes: object) -> None:
    """Replace a file as an attacker would, who knows the format but not the key."""
    body = msgspec.structs.replace(integrity.opened((folder / name).read_bytes(), kind, name), **changes)
    (folder / name).write_bytes(integrity.sealed(body, key))


def forged_weights(folder: Path) -> None:
    """Other weights, with every checksum and size right; the signature of the manifest is kept."""
    file = folder / TENSORS
    data = bytearray(file.read_bytes())
    data[-4:] = b"\0\0\x80\x3f"
    file.write_bytes(data)
    table = integrity.opened((folder / TABLE).read_bytes(), Table, TABLE)
    pieces = [
        msgspec.structs.replace(one, checksum=integrity.checksum(bytes(data[one.begin : one.end])))
        for one in table.pieces
    ]
    resealed(folder, TABLE, Table, pieces=pieces, digest=integrity.digest(bytes(data)))
    content = (folder / TABLE).read_bytes()
    manifest = integrity.opened((folder / MANIFEST).read_bytes(), Manifest, MANIFEST)
    files = [
        msgspec.structs.replace(
            one, size=len(content), checksum=integrity.checksum(content), digest=integrity.digest(content)
        )
        if one.name == TABLE
        else one
        for one in manifest.files
    ]
    kept = msgspec.json.decode((folder / MANIFEST).read_bytes())["signature"]
    resealed(folder, MANIFEST, Manifest, files=files)
    changed = msgspec.json.decode((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(msgspec.json.encode({**changed, "signature": kept}))


def same_checksum(folder: Path) -> None:
    """Other weights, with four bytes chosen so that every crc32 stays the same: nothing else is changed."""
    table = integrity.opened((folder / TABLE).read_bytes(), Table, TABLE)
    piece = max(table.pieces, key=lambda one: one.end - one.begin)
    file = folder / TENSORS
    data = bytearray(file.read_bytes())
    block = data[piece.begin : piece.end]
    block[0] ^= 1
    # crc32 is affine over GF(2): solve for the last four bytes.
    block[-4:] = bytes(4)
    base = integrity.checksum(bytes(block))
    columns = []
    for bit in range(32):
        block[-4:] = (1 << bit).to_bytes(4, "little")
        columns.append(integrity.checksum(bytes(block)) ^ base)
    block[-4:] = _solved(columns, base ^ piece.checksum).to_bytes(4, "little")
    assert integrity.checksum(bytes(block)) == piece.checksum
    data[piece.begin : piece.end] = block
    file.write_bytes(data)


def _solved(columns: list[int], target: int) -> int:
    rows = [(column, 1 << bit) for bit, column in enumerate(columns)]
    found = 0
    for bit in range(32):
        pivot = next((row for row in rows if row[0] >> bit & 1), None)
        if pivot is None:
            continue
        rows = [(v ^ pivot[0], m ^ pivot[1]) if v >> bit & 1 else (v, m) for v, m in rows if (v, m) != pivot]
        if target >> bit & 1:
            target, found = target ^ pivot[0], found ^ pivot[1]
    assert target == 0
    return found


ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "not signed": (lambda folder: resealed(folder, MANIFEST, Manifest), "is not signed"),
    "signed with another key": (lambda folder: resealed(folder, MANIFEST, Manifest, OTHER), "wrong signature"),
    "a table signed as a manifest": (lambda folder: shutil.copy(folder / TABLE, folder / MANIFEST), "wrong signature"),
    "other weights": (forged_weights, "wrong signature"),
    "other weights of the same checksums": (same_checksum, "is not the file that was signed"),
    "other values": (lambda folder: resealed(folder, STATE, Values, OTHER, step=7), f"{STATE}: checksum is "),
    "an old one under a new name": (
        lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.parent / "step-000000000001", folder)),  # type: ignore[func-returns-value,dict-item]
        "was signed for step 1",
    ),
    "an old table": (
        lambda folder: shutil.copy(folder.parent / "step-000000000001" / TABLE, folder / TABLE),
        f"{TABLE}: ",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_checkpoint_is_refused_and_the_one_before_is_used(attack: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    assert loaded(tmp_path, KEY) == (2, 2.0, [])
    change, why = ATTACKS[attack]
    change(tmp_path / "step-000000000002")
    step, weight, messages = loaded(tmp_path, KEY)
    assert (step, weight) == (1, 1.0)
    assert "step-000000000002 is refused, and not used" in messages[0]
    assert why in messages[0]


def test_without_the_key_such_forgeries_are_loaded(tmp_path: Path) -> None:
    """This is why there is a key: checksums detect errors, not manipulation."""
    saved(tmp_path, 1, 2)
    same_checksum(tmp_path / "step-000000000002")
    assert loaded(tmp_path, b"")[0] == 2


def test_unsigned_and_signed_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, 1, key=b"")
    assert b"signature" not in (tmp_path / "step-000000000001" / MANIFEST).read_bytes()
    with pytest.raises(CheckpointError, match="has a signature of this key: 1 refused") as refused:
        loaded(tmp_path, KEY)
    assert "is not signed" in str(refused.value)
    assert "without --checkpoint-key if you trust them" in refused.value.fix
    assert Checkpoints(tmp_path, key=KEY).latest() is None
    saved(tmp_path, 2)
    assert loaded(tmp_path, KEY)[0] == 2
    assert loaded(tmp_path, b"")[0] == 2  # without a key it is read like any other


def test_the_file_with_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(OptionError, match="No such file"):
        read_key(str(file))
    file.write_bytes(b"secret" * 10 + b"\n")
    file.chmod(0o600)
    assert read_key(str(file)) == b"secret" * 10
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(OptionError, match="open to other users") as refused:
            read_key(str(file))
        assert "secret" not in str(refused.value)
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(OptionError, match="has 5 bytes") as refused:
        read_key(str(file))
    assert "short" not in str(refused.value)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path):
        with pytest.raises(OptionError, match="not a regular file"):
            read_key(str(path))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user's")
def test_a_key_of_another_user(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"secret" * 10)
    file.chmod(0o600)
    os.chown(file, 12345, -1)
    with pytest.raises(OptionError, match="belongs to another user"):
        read_key(str(file))
