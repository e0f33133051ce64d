"""`phalanx bench NAME`: runs a benchmark of the repository. The package `benchmarks` is not part of the wheel."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[3]


def main(argv: list[str]) -> int:
    """Find the package `benchmarks` and pass the command line to it."""
    # An editable install runs from CHECKOUT/src/phalanx.
    root = find_checkout((PACKAGE.parents[1], Path.cwd()))
    sys.path.insert(0, str(root))
    code: int = importlib.import_module("benchmarks.main").main(argv, environment())
    return code


def find_checkout(folders: Sequence[Path]) -> Path:
    """Return the first folder that is a checkout of phalanx; UsageError if there is none."""
    for folder in folders:
        if _is_checkout(folder):
            return folder
    raise UsageError(
        "phalanx bench needs a checkout of the phalanx repository: the installed package has no benchmarks",
        details=[
            f"looked for the package benchmarks in the current folder, {Path.cwd()}",
            f"and in the checkout of phalanx, but {PACKAGE} is not an editable install",
        ],
        fix="git clone https://github.com/phalanx-train/phalanx; cd phalanx; pip install -e '.[bench]'; phalanx bench",
    )


def _is_checkout(folder: Path) -> bool:
    """Return whether a folder is a checkout of phalanx: other projects may have a package `benchmarks`."""
    if not (folder / "benchmarks" / "main.py").is_file():
        return False
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    return bool(project.get("name") == "phalanx")
