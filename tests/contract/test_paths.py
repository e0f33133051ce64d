"""Files and modules that other code finds by name exist, so that a move does not go unnoticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import phalanx
from phalanx.collectives import errors
from phalanx.forkserver import paths

PACKAGE = Path(phalanx.__file__).parent
BELOW = (
    *paths.USER_CODE,
    *paths.ENTRY,
    *(start for start, _ in paths.PHASES),
    *paths.PROBE,
    *paths.LIBRARY,
    *(paths.FORK_SERVER, paths.HOOK, paths.COLLECTIVES, paths.WORK, paths.THREADED),
)
LOADED = [
    name.replace("_phalanx_forkserver", "phalanx.forkserver") for name in (paths.PROBE_MODULE, paths.CHECKER_MODULE)
]


def test_the_root_is_the_package() -> None:
    assert Path(paths.ROOT) == PACKAGE


@pytest.mark.parametrize("path", BELOW)
def test_a_path_exists(path: str) -> None:
    assert (PACKAGE / path).is_dir() if path.endswith("/") else (PACKAGE / path).is_file()


@pytest.mark.parametrize("module", [paths.FLIGHT_RECORDER, paths.GROUPS, *paths.TRAINING, *LOADED])
def test_a_module_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", [*paths.LOST_PEER, paths.MISMATCH])
def test_an_exception_exists(name: str) -> None:
    assert errors.__name__ == paths.ERRORS
    assert issubclass(getattr(errors, name), Exception)


@pytest.mark.parametrize("module", LOADED)
def test_the_module_has_a_current_instance(module: str) -> None:
    assert hasattr(importlib.import_module(module), "current")
