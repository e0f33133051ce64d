"""Ctrl-C before there is a run, which would report it."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.cli.main import command, main


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("verb", "name"), [("run", "make_plan"), ("run", "run_plan"), ("chaos", "detect_context")])
def test_ctrl_c_before_there_is_a_run(
    verb: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command(verb), name, lambda *_, **__: interrupt())
    assert main([verb, "--cpu", __file__]) == 130
    assert capsys.readouterr() == ("", "phalanx: stopped by Ctrl-C\n")


def test_ctrl_c_in_another_command_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command("ps"), "main", interrupt)
    assert main(["ps"]) == 130
    assert capsys.readouterr() == ("", "")
