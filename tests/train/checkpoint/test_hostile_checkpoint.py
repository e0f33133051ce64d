"""Malicious checkpoints: rejected before anything is allocated or opened, and the previous one is used."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from phalanx.train.checkpoint import CheckpointError, Checkpoints
from phalanx.train.checkpoint.format import integrity
from phalanx.train.checkpoint.format.manifest import MANIFEST, STATE, Manifest, Piece, Table, Values, table_file

TABLE, TENSORS = table_file(0), "rank-00000.safetensors"
Change = Callable[[Path], None]


def sealed(file: Path, kind: Any) -> Any:
    return integrity.opened(file.read_bytes(), kind, file.name)


def rewrite(folder: Path, name: str, body: Any) -> None:
    """Replace a file, with right checksums and sizes: anyone who changes it can compute them."""
    replace_file(folder, name, integrity.sealed(body))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    if name != MANIFEST:
        entry(name, size=len(data), checksum=integrity.checksum(data))(folder)


def manifest(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        rewrite(folder, MANIFEST, msgspec.structs.replace(sealed(folder / MANIFEST, Manifest), **changes))

    return change


def entry(file: str, /, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        found = sealed(folder / MANIFEST, Manifest)
        files = [msgspec.structs.replace(one, **changes) if one.name == file else one for one in found.files]
        rewrite(folder, MANIFEST, msgspec.structs.replace(found, files=files))

    return change


def table(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        rewrite(folder, TABLE, msgspec.structs.replace(sealed(folder / TABLE, Table), **changes))

    return change


def pieces(make: Callable[[list[Piece]], list[Piece]]) -> Change:
    def change(folder: Path) -> None:
        found = sealed(folder / TABLE, Table)
        rewrite(folder, TABLE, msgspec.structs.replace(found, pieces=make(found.pieces)))

    return change


def piece(**changes: Any) -> Change:
    return pieces(lambda found: [msgspec.structs.replace(found[0], **changes), *found[1:]])


def values(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        rewrite(folder, STATE, msgspec.structs.replace(sealed(folder / STATE, Values), **changes))

    return change


def linked(name: str) -> Change:
    def change(folder: Path) -> None:
        outside = folder.parent.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return change


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def nested(depth: int) -> Change:
    def change(folder: Path) -> None:
        text = b'{"step":2,"extra":{},"plain":{"a":' + b"[" * depth + b"]" * depth + b"}}"
        replace_file(
            folder, STATE, msgspec.json.encode({"checksum": integrity.checksum(text), "body": msgspec.Raw(text)})
        )

    return change


def overlapping(found: list[Piece]) -> list[Piece]:
    """The same half twice: as many elements as the tensor, but half of them are missing."""
    first = found[0]
    assert first.sizes[0] % 2 == 0
    middle = (first.begin + first.end) // 2
    half = [first.sizes[0] // 2, *first.sizes[1:]]
    one = msgspec.structs.replace(first, sizes=half, end=middle)
    return [one, msgspec.structs.replace(one, begin=middle, end=first.end), *found[1:]]


def twice_in_the_file(found: list[Piece]) -> list[Piece]:
    """A thousand tensors in the memory of one."""
    return [*found, *(msgspec.structs.replace(found[0], name=f"more.{number}") for number in range(1000))]


HOSTILE: dict[str, Change] = {
    "no ranks": manifest(world_size=0),
    "negative ranks": manifest(world_size=-1),
    "a billion ranks": manifest(world_size=10**9),
    "another format": manifest(format=99),
    "a name outside": entry(TENSORS, name="../outside"),
    "an absolute name": entry(TENSORS, name="/etc/passwd"),
    "an unknown name": entry(TENSORS, name="model.pkl"),
    "a file twice": lambda folder: rewrite(
        folder,
        MANIFEST,
        msgspec.structs.replace(m := sealed(folder / MANIFEST, Manifest), files=[*m.files, m.files[0]]),
    ),
    "a negative size": entry(TENSORS, size=-1),
    "a huge size": entry(TENSORS, size=1 << 60),
    "a table without checksum": entry(TABLE, checksum=None),
    "the table of another rank": table(rank=7),
    "a table of a file outside": table(file="../../outside"),
    "a table of the manifest": table(file=MANIFEST),
    "a header beyond the file": table(header=1 << 40),
    "a tensor of a terabyte": piece(shape=[1 << 38], offsets=[0], sizes=[1 << 38]),
    "a shape that its bytes do not fill": piece(shape=[1 << 38, 4]),
    "negative sizes": piece(sizes=[-4, -4]),
    "an offset outside": piece(offsets=[1 << 40, 0]),
    "bytes beyond the file": piece(begin=1 << 40, end=(1 << 40) + 64),
    "bytes before the file": piece(begin=-64),
    "bytes of the header": piece(begin=0),
    "a thousand dimensions": piece(shape=[1] * 1000, offsets=[0] * 1000, sizes=[1] * 1000),
    "too few offsets": piece(offsets=[0]),
    "an unknown type": piece(dtype="Generator"),
    "another type": piece(dtype="F64"),
    "a hole": pieces(lambda found: found[1:]),
    "pieces that overlap": pieces(overlapping),
    "a thousand tensors in one place": pieces(twice_in_the_file),
    "random state that is none": table(random={}),
    "random state of the wrong size": table(random={"torch": "AAAA", "python": [3, [1], None], "generators": []}),
    "a tensor that is in no file": values(plain={"model": {"$tensor": "elsewhere"}}),
    "a tag with a wrong body": values(plain={"a": {"$bytes": 17}}),
    "a tag of a device": values(plain={"a": {"$device": "no such device"}}),
    "a key that is a list": values(plain={"a": {"$dict": [[[1], 2]]}}),
    "a hundred thousand brackets": nested(100_000),
    "a linked manifest": linked(MANIFEST),
    "a linked table": linked(TABLE),
    "linked tensors": linked(TENSORS),
    "a FIFO for the manifest": fifo(MANIFEST),
    "a FIFO for tensors": fifo(TENSORS),
}


def network() -> nn.Module:
    return nn.Linear(4, 4, bias=False)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of the steps 1 and 2."""
    folder = tmp_path_factory.mktemp("honest")
    torch.manual_seed(3)
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"model": network()})
    return folder


def copied(honest: Path, to: Path) -> Path:
    folder = to / "checkpoints"
    for checkpoint in honest.glob("step-*"):
        target = folder / checkpoint.name
        target.mkdir(parents=True)
        for file in checkpoint.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_and_the_one_before_is_used(name: str, honest: Path, tmp_path: Path) -> None:
    folder = copied(honest, tmp_path)
    HOSTILE[name](folder / "step-000000000002")
    messages: list[str] = []
    model = network()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = Checkpoints(folder, say=messages.append).load({"model": model})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert found is not None
    assert found.step == 1, name
    assert "step-000000000002 is corrupted, and not used" in messages[0]
    fresh = network()
    Checkpoints(honest).load({"model": fresh}, Checkpoints(folder)._reader._folder.info("step-000000000001"))
    assert torch.equal(model.weight, fresh.weight)  # type: ignore[arg-type]


def test_an_unchanged_copy_is_used(honest: Path, tmp_path: Path) -> None:
    found = Checkpoints(copied(honest, tmp_path)).load({"model": network()})
    assert found is not None
    assert found.step == 2


def test_a_checkpoint_that_is_a_link_is_not_used(honest: Path, tmp_path: Path) -> None:
    folder = copied(honest, tmp_path)
    (folder / "step-000000000003").symlink_to(honest / "step-000000000002")
    found = Checkpoints(folder, say=lambda _: None).load({"model": network()})
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_the_lock_is_a_file_of_this_folder(kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if kind == "link":
        (folder / ".lock").symlink_to(victim)
    else:
        os.mkfifo(folder / ".lock")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoints(folder).open()
    assert victim.read_text() == "precious"
