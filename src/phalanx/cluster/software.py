"""The installed versions, without importing anything."""

from __future__ import annotations

import os
import platform
import re
import sys

from phalanx.version import __version__

_INFO = ".dist-info"
_NAMES = re.compile(r"(torch|phalanx|nvidia-nccl.*)")


def versions() -> dict[str, str]:
    """Return the versions that must match across nodes."""
    found = {"phalanx": __version__, "python": platform.python_version()}
    there = dict(reversed(packages()))  # of duplicates, the first is imported
    if "torch" in there:
        found["torch"] = there["torch"]
    nccl = next(filter(None, (there.get(f"nvidia-nccl-cu{major}") for major in (13, 12, 11))), "")
    if nccl:
        found["nccl"] = nccl
    return found


def packages() -> list[tuple[str, str]]:
    """Return torch, phalanx and NCCL packages with versions, in the order of sys.path.

    It reads folder names only: the metadata of all packages would take half a second.
    """
    found: list[tuple[str, str]] = []
    for folder in dict.fromkeys(sys.path):
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue  # an archive, or missing
        for entry in entries:
            name, _, version = entry.removesuffix(_INFO).rpartition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            if entry.endswith(_INFO) and _NAMES.fullmatch(name) and (name, version) not in found:
                found.append((name, version))
    if not any(name == "torch" for name, _ in found):
        found += _otherwise("torch")
    return found


def _otherwise(name: str) -> list[tuple[str, str]]:
    """Return a package without a .dist-info folder, such as an egg."""
    from importlib import metadata

    try:
        return [(name, metadata.version(name))]
    except metadata.PackageNotFoundError:
        return []
