"""TensorBoard's event files, written without TensorBoard, which takes ten times as long per value.

A file is a sequence of records (length, checksum of that, data, checksum of that), the data a protocol buffer `Event`:

    wall_time = 1 double, step = 2, file_version = 3 text, summary = 5 { value = 1 { tag = 1, simple_value = 2 } },
    session_log = 7 { status = 1: START }: a reader drops what it has read of this step and later ones
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache

_VERSION = b"\x1a\x0dbrain.Event:2"
_START = b"\x3a\x02\x08\x01"
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected


class TensorBoardWriter:
    """Writes scalars by step. Values that earlier processes wrote for step `first` and later ones are hidden."""

    def __init__(self, folder: str, first: int) -> None:
        os.makedirs(folder, exist_ok=True)
        # Files are read in the order of their names, so all times have the same number of digits.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(os.path.join(folder, name), "wb")  # noqa: SIM115
        self._file.write(_record(_event(time.time(), 0) + _VERSION) + _record(_event(time.time(), first) + _START))
        self._file.flush()

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Write the values of one step."""
        summary = b"".join([_head(name) + _float(value) for name, value in values.items()])
        self._file.write(_record(b"".join((_event(when, step), b"\x2a", _varint(len(summary)), summary))))

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _event(when: float, step: int) -> bytes:
    return b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step)


@cache
def _head(name: str) -> bytes:
    """Return everything of a value except the number."""
    tag = name.encode()
    tagged = b"\x0a" + _varint(len(tag)) + tag + b"\x15"
    return b"\x0a" + _varint(len(tagged) + 4) + tagged


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # does not fit into 32 bits
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _record(data: bytes) -> bytes:
    return b"".join((_length(len(data)), data, struct.pack("<I", checksum(data))))


@cache
def _length(size: int) -> bytes:
    packed = struct.pack("<Q", size)
    return packed + struct.pack("<I", checksum(packed))


def checksum(data: bytes) -> int:
    """Return the masked CRC-32C of the format."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
    return number


_TABLE = tuple(map(_entry, range(256)))
