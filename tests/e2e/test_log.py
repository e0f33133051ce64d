"""PHALANX_LOG: the log of phalanx itself."""

from __future__ import annotations

from pathlib import Path

from tests.kit.cli import phalanx

SCRIPT = """
import logging
logging.getLogger("phalanx.worker").debug("only with PHALANX_LOG")
print(len(logging.getLogger("phalanx").handlers), "handlers")
"""


def test_workers_log_to_their_standard_error(tmp_path: Path) -> None:
    script = tmp_path / "log.py"
    script.write_text(SCRIPT)
    quiet = phalanx("run", "-g", "1", str(script))
    assert "0 handlers" in quiet.out
    assert "only with" not in quiet.out + quiet.err
    logged = phalanx("run", "-g", "1", str(script), env={"PHALANX_LOG": "debug"})
    assert "1 handlers" in logged.out
    assert "DEBUG phalanx.worker: only with PHALANX_LOG" in logged.err


def test_an_unknown_level_is_refused() -> None:
    found = phalanx("ps", env={"PHALANX_LOG": "loud"})
    assert found.code == 2
    assert "PHALANX_LOG is 'loud', expected one of debug, info, warning, error" in found.err
