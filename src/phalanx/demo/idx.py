"""Loads images and labels from IDX files (the format of MNIST), or the small set that comes with phalanx.

images, labels = idx.load()                            # 1,437 digits of 8 by 8 pixels, for training
images, labels = idx.load(test=True)                   # 360 other digits
images, labels = idx.load("~/mnist", test=True)        # the MNIST files, compressed (.gz) or not
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import torch

from phalanx.errors import UsageError

EMBEDDED = Path(__file__).parent / "digits"
LARGEST = 1 << 30  # bytes; MNIST's largest file has 47 MB
_BYTES = 0x08  # the only element type in MNIST's files
_FIX = "--data DIR: a folder with MNIST's four files, {}; without it the digits that come with phalanx"


def load(folder: str | Path | None = None, *, test: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images as floats from 0 to 1, shape (count, 1, height, width), and their labels as integers."""
    where = EMBEDDED if folder is None else Path(folder).expanduser()
    part = "t10k" if test else "train"
    images_at, labels_at = _find(where, f"{part}-images", 3), _find(where, f"{part}-labels", 1)
    images, labels = read(images_at, dims=3), read(labels_at, dims=1)
    if len(images) != len(labels):
        raise UsageError(
            f"{images_at.name} has {len(images)} images, {labels_at.name} has {len(labels)} labels",
            details=[f"both in {where}; there must be a label for every image"],
            fix="take the two files from the same place",
        )
    return images.unsqueeze(1).float() / 255, labels.long()


def read(path: str | Path, *, dims: int | None = None) -> torch.Tensor:
    """Read one IDX file, compressed or not. The header gives the shape."""
    path = Path(path)
    try:
        with _open(path) as file:
            shape = _header(path, file, dims)
            size = math.prod(shape)
            if size > LARGEST:
                raise _broken(path, f"its header promises {size} bytes of data, more than the {LARGEST} that are read")
            body = file.read(size + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _broken(path, f"it cannot be unpacked: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", fix=_FIX.format(path.name)) from None
    if len(body) != size:
        seen = "more" if len(body) > size else str(len(body))
        raise _broken(path, f"its header promises {_times(shape)} = {size} bytes of data, it has {seen}")
    if not size:
        raise _broken(path, f"it is empty: its header says {_times(shape)}")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape(shape)


def _header(path: Path, file: IO[bytes], dims: int | None) -> tuple[int, ...]:
    """Read the header: two zeros, the element type, the number of dimensions; then each dimension, big-endian."""
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        seen = head.hex(" ") or "nothing"
        raise _broken(path, f"it begins with {seen}; an IDX file begins with 00 00 08 and its number of dimensions")
    if head[2] != _BYTES:
        raise _broken(path, f"its elements are of type 0x{head[2]:02x}; only bytes (0x08) are read")
    if dims is not None and head[3] != dims:
        raise _broken(path, f"it has {head[3]} dimensions, expected {dims}: images have 3, labels 1")
    sizes = file.read(4 * head[3])
    if len(sizes) != 4 * head[3]:
        raise _broken(path, "it ends within its header")
    return struct.unpack(f">{head[3]}I", sizes)


def _find(folder: Path, stem: str, dims: int) -> Path:
    """Find a file by its MNIST name, or by common variants of the name and of the folder (MNIST/raw)."""
    names = [f"{stem}{mark}idx{dims}-ubyte" for mark in "-."]
    places = (folder, folder / "MNIST" / "raw")
    tried = [place / (name + end) for place in places for name in names for end in ("", ".gz")]
    for path in tried:
        if path.is_file():
            return path
    there = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else None
    raise UsageError(
        f"no {names[0]} (or {names[0]}.gz) in {folder}",
        details=["there is no such folder" if there is None else f"in it: {', '.join(there) or 'nothing'}"],
        fix=_FIX.format(f"{names[0]}.gz among them"),
    )


def _open(path: Path) -> IO[bytes]:
    # Check the content, not the name: downloads get renamed.
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path, "rb")) if packed else path.open("rb")


def _broken(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not the IDX file that it should be", details=[why], fix="download it again")


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
