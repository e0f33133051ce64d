"""What `phalanx plan` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.commands.run import plan


def test_nodes_and_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert plan.main(["--hosts", "a:2,b:1", "--cpu", str(Path(__file__))]) == 0
    shown = capsys.readouterr().out
    assert "0  a: 2 workers, ranks 0-1\n" in shown
    assert "1  b: 1 worker, rank 2\n" in shown
    assert "TORCHELASTIC_ERROR_FILE=RUN/attempt_0/2/error.json" in shown  # in one piece: this is not a terminal
