"""The installed versions, without importing anything."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence

from phalanx.version import __version__

_INFO = ".dist-info"
_CUDA = re.compile(r"""(?m)^cuda\s*(?::[^=]*)?=\s*['"]([\w.]+)['"]""")
_NAMES = re.compile(r"(torch|phalanx|nvidia-nccl.*)")


def versions(paths: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions that must match across nodes. `paths`: folders to search, instead of sys.path."""
    found = {"phalanx": __version__, "python": platform.python_version()}
    there = dict(reversed(packages(paths)))  # of duplicates, the first is imported
    if "torch" in there:
        found["torch"] = there["torch"]
    nccl = next(filter(None, (there.get(f"nvidia-nccl-cu{major}") for major in (13, 12, 11))), "")
    if nccl:
        found["nccl"] = nccl
    return found


def complete(found: Mapping[str, str], paths: Sequence[str] | None = None) -> dict[str, str]:
    """Return `found` with the version of CUDA, which is in torch's version.py."""
    for folder in sys.path if paths is None else paths:
        try:
            with open(os.path.join(folder, "torch", "version.py"), errors="replace") as file:
                cuda = _CUDA.search(file.read(1 << 14))
        except OSError:
            continue
        return {**found, "cuda": cuda[1]} if cuda else dict(found)
    return dict(found)


def packages(paths: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Return torch, phalanx and NCCL packages with versions, in the order of sys.path.

    It reads folder names only: the metadata of all packages would take half a second.
    """
    found: list[tuple[str, str]] = []
    for folder in dict.fromkeys(sys.path if paths is None else paths):
        try:
            entries = sorted(entry for entry in os.listdir(folder or ".") if entry.endswith(_INFO))
        except OSError:
            continue  # an archive, or missing
        for entry in entries:
            name, _, version = entry.removesuffix(_INFO).rpartition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            if _NAMES.fullmatch(name) and (name, version) not in found:
                found.append((name, version))
    if paths is None and not any(name == "torch" for name, _ in found):
        found += _otherwise("torch")
    return found


def _otherwise(name: str) -> list[tuple[str, str]]:
    """Return a package without a .dist-info folder, such as an egg."""
    from importlib import metadata

    try:
        return [(name, metadata.version(name))]
    except metadata.PackageNotFoundError:
        return []
