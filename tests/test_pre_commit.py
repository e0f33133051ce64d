"""The hooks of pre-commit run what `make check` runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_hooks_run_the_commands_of_make_check() -> None:
    hooks = re.findall(r"^ *entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    commands = [line.strip().lstrip("@").replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert hooks == commands
