"""Which tests run only in `make test-all`."""

from __future__ import annotations

import pytest

from tests.kit.tiers import is_extended

NONE = frozenset[str]()


@pytest.mark.parametrize(
    ("path", "fixtures", "marks", "extended"),
    [
        ("diagnose/test_blame.py", NONE, NONE, False),
        ("train/test_run.py", NONE, frozenset({"warmed", "parametrize"}), False),
        ("train/test_run.py", NONE, frozenset({"extended"}), True),
        ("launcher/remote/test_ssh.py", frozenset({"lab", "tmp_path"}), NONE, True),
        ("faithful/test_exits.py", NONE, NONE, True),
        ("e2e/ends/test_endings.py", NONE, NONE, True),
        ("e2e/ends/test_endings.py", NONE, frozenset({"smoke"}), False),
        ("e2e/ends/test_endings.py", frozenset({"slurm"}), frozenset({"smoke"}), True),
        # One test of a file that is marked as a whole.
        ("e2e/ends/test_endings.py", NONE, frozenset({"smoke", "extended"}), False),
    ],
)
def test_extended_tests_are_recognized(
    path: str, fixtures: frozenset[str], marks: frozenset[str], extended: bool
) -> None:
    assert is_extended(path, fixtures, marks) is extended
