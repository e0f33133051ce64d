"""Which versions there are on this machine, without importing any of it."""

from __future__ import annotations

import platform
from importlib import metadata

from phalanx.version import __version__


def versions() -> dict[str, str]:
    """Of everything that has to fit together across nodes; what is not there is not named."""
    found = {"phalanx": __version__, "python": platform.python_version()}
    torch = _version("torch")
    if torch:
        found["torch"] = torch
    nccl = next(filter(None, (_version(f"nvidia-nccl-cu{major}") for major in (13, 12, 11))), "")
    if nccl:
        found["nccl"] = nccl
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
