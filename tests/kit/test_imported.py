"""Plain Python with torch already imported: its streams, its end and its main module are those of any other."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.kit.cli import python as fresh
from tests.kit.imported import python, start
from tests.kit.proc import alive

pytestmark = [pytest.mark.imported, pytest.mark.xdist_group("imported")]

SCRIPT = """
import atexit, os, sys
atexit.register(print, "the end")
print(__name__, __file__, sys.argv, os.getcwd(), os.environ.get("MINE"), sys.stdin.read() == "")
print("beside", file=sys.stderr)
print(os.getsid(0) == os.getpid(), os.path.samefile(sys.path[0], os.path.dirname(__file__)))
sys.exit(len(sys.argv))
"""


@pytest.mark.extended
def test_it_behaves_like_a_new_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    ours, theirs = (run(str(script), "a b", "", env={"MINE": "x"}, cwd=str(tmp_path)) for run in (python, fresh))
    assert (ours.code, ours.out, ours.err) == (theirs.code, theirs.out, theirs.err)
    assert ours.code == 3


def test_the_interpreter_has_torch() -> None:
    assert python("-c", "import sys; print('torch' in sys.modules, sys.argv)", "x").out == "True ['-c', 'x']\n"


def test_the_interpreter_can_be_signalled_and_waited_for() -> None:
    jobs = [start("-c", "import time; print('up'); time.sleep(600)") for _ in range(2)]
    for job in jobs:
        job.wait_for("up")
    jobs[0].signal(signal.SIGINT)
    assert jobs[0].wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in jobs[0].err
    assert alive(jobs[1].pid)
    jobs[1].signal(signal.SIGKILL)
    assert jobs[1].wait() == -signal.SIGKILL
