"""What `make test-all` runs again: all that has failed, whatever it is called, and whatever group it is in."""

from __future__ import annotations

import os
from pathlib import Path

from tests.kit.cli import PYTHON, run

TESTS = """
import pytest

@pytest.mark.xdist_group("two words")
@pytest.mark.parametrize("name", ["a@b", "c::d", "e [f]"])
def test_grouped(name):
    assert name == "c::d"

def test_plain():
    raise ValueError

def test_good():
    pass
"""


def test_what_has_failed_is_run_again(tmp_path: Path) -> None:
    file, failed = tmp_path / "test_some.py", tmp_path / "failed"
    file.write_text(TESTS)
    words = (*PYTHON, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    words = (*words, "--basetemp", str(tmp_path / "their"), "-p", "tests.kit.plugin")
    first = run((*words, "-n", "1", "--dist", "loadgroup", "--failed-to", str(failed), str(file)))
    assert "3 failed, 2 passed" in first.out, first.out + first.err
    again = run((*words, f"@{failed}"), cwd=str(tmp_path), env={"PYTHONPATH": os.getcwd()})
    assert "3 failed in" in again.out, again.out + again.err
    run((*words, "--failed-to", str(failed), f"{file}::test_good"))
    assert not failed.exists()
