"""Fixtures that several of these test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.parties import actor
from tests.kit.cli import Handle


@pytest.fixture
def led() -> Iterator[Handle]:
    """A leader in its own process."""
    with actor("leader", "2", "15") as job:
        yield job
        assert job.err == ""
