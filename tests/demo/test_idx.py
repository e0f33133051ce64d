"""IDX files: the digits that come with phalanx, variants of MNIST's file names, and invalid files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from phalanx.demo import idx
from phalanx.errors import UsageError


def packed(data: bytes, *shape: int, kind: int = 8) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + data


def mnist(folder: Path, *, images: int = 3, labels: int = 3) -> None:
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(packed(bytes(range(images * 4)), images, 2, 2))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(packed(bytes(range(labels)), labels))


def test_the_digits_of_phalanx() -> None:
    images, labels = idx.load()
    tests, answers = idx.load(test=True)
    assert (images.shape, tests.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (images.min(), images.max()) == (0, 1)
    # From the description of the set: images per digit, and the sum of all pixels (0 to 16).
    assert torch.cat([labels, answers]).bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int((torch.cat([images, tests]) * 16).round().sum()) == 561718


@pytest.mark.parametrize("place", [".", "MNIST/raw"])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("zipped", [True, False])
def test_mnist(tmp_path: Path, place: str, mark: str, zipped: bool) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    pixels = bytes([0, 51, 255, 102])
    for stem, data in (("t10k-images", packed(pixels, 1, 2, 2)), ("t10k-labels", packed(b"\7", 1))):
        dims = 3 if "images" in stem else 1
        name = f"{stem}{mark}idx{dims}-ubyte"
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    images, labels = idx.load(tmp_path, test=True)
    torch.testing.assert_close(images, torch.tensor([[[[0, 0.2], [1, 0.4]]]]))
    assert labels.tolist() == [7]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it begins with nothing; an IDX file begins with 00 00 08"),
        (b"<html>", "it begins with 3c 68 74 6d; an IDX file begins with 00 00 08"),
        (packed(b"", 1, 2, 2, kind=13), "its elements are of type 0x0d; only bytes"),
        (packed(b"\1", 1), "it has 1 dimensions, expected 3"),
        (packed(b"", 1, 2, 2)[:9], "it ends within its header"),
        (packed(b"\1\2\3", 1, 2, 2), "promises 1 x 2 x 2 = 4 bytes of data, it has 3"),
        (packed(b"\1\2\3\4\5", 1, 2, 2), "promises 1 x 2 x 2 = 4 bytes of data, it has more"),
        (packed(b"", 0, 28, 28), "it is empty: its header says 0 x 28 x 28"),
        (packed(b"", 2**32 - 1, 2**32 - 1, 9), "more than the 1073741824 that are read"),
        (gzip.compress(packed(bytes(4), 1, 2, 2), mtime=0)[:-12], "it cannot be unpacked"),
        (gzip.compress(packed(bytes(4), 1, 2, 2), mtime=0)[:-8] + bytes(8), "it cannot be unpacked"),
        (b"\x1f\x8bnot so", "it cannot be unpacked"),
    ],
)
def test_broken(tmp_path: Path, data: bytes, why: str) -> None:
    mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        idx.load(tmp_path)
    assert caught.value.what == f"{path} is not the IDX file that it should be"
    assert why in caught.value.details[0]


def test_labels_that_do_not_match_the_images_are_refused(tmp_path: Path) -> None:
    mnist(tmp_path, labels=4)
    with pytest.raises(UsageError, match="has 3 images, train-labels-idx1-ubyte has 4 labels"):
        idx.load(tmp_path)


def test_a_folder_without_them(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(UsageError) as caught:
        idx.load(tmp_path)
    assert "no train-images-idx3-ubyte (or train-images-idx3-ubyte.gz)" in caught.value.what
    assert caught.value.details == ("in it: cat.jpg",)
    with pytest.raises(UsageError, match="there is no such folder"):
        idx.load(tmp_path / "none")


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        idx.read(tmp_path / "none")
