"""A pseudo-terminal for tests of the console."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launcher.output.console.emulator import Terminal


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()
