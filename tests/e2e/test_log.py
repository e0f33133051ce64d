"""PHALANX_LOG: the log of phalanx itself."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.kit.cli import phalanx, warm_environment

SCRIPT = """
import logging
logging.getLogger("phalanx.worker").debug("only with PHALANX_LOG")
print(len(logging.getLogger("phalanx").handlers), "handlers")
"""


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["--fresh", "warm"])
def test_workers_log_to_their_standard_error(tmp_path: Path, way: str) -> None:
    """The fork server that they come from may have another environment."""
    script = tmp_path / "log.py"
    script.write_text(SCRIPT)
    words = ("run", "-g", "1", *([way] if way == "--fresh" else []), str(script))
    with warm_environment() if way == "warm" else nullcontext({}) as env:
        quiet = phalanx(*words, env=env)
        logged = phalanx(*words, env={**env, "PHALANX_LOG": "debug"})
    assert "0 handlers" in quiet.out
    assert "only with" not in quiet.out + quiet.err
    assert "1 handlers" in logged.out
    assert "DEBUG phalanx.worker: only with PHALANX_LOG" in logged.err


@pytest.mark.smoke
def test_an_unknown_level_is_refused() -> None:
    found = phalanx("ps", env={"PHALANX_LOG": "loud"})
    assert found.code == 2
    assert "PHALANX_LOG is 'loud', expected one of debug, info, warning, error" in found.err
