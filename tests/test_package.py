"""An installed phalanx has every file, also in folders that are not packages."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"


def test_every_file_is_in_a_package_or_named_as_its_data() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["phalanx"]
    named = {path for pattern in data for path in SOURCE.glob(pattern)}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    in_packages = {path for path in files if path.suffix == ".py" and (path.parent / "__init__.py").exists()}
    assert {str(path.relative_to(SOURCE)) for path in files - in_packages - named} == set()
    assert SOURCE / "forkserver/hook/sitecustomize.py" in named
