"""What `phalanx run` imports before it starts a fork server, which delays the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cli import python

# Ends at the start of the fork server, and prints what phalanx has imported until then.
UNTIL_THE_START = """
import os, sys

def event(name, _):
    if name == "subprocess.Popen":
        print(*sys.modules.keys() - before, sep="\\n", flush=True)
        os._exit(0)

before = set(sys.modules)
sys.addaudithook(event)
from phalanx.cli.main import main
main(sys.argv[1:])
"""

LATER = {
    *("asyncio", "encodings.idna", "logging", "msgspec", "psutil", "shutil", "ssl", "tempfile"),
    *("phalanx.control", "phalanx.diagnose", "phalanx.doctor", "phalanx.recover", "phalanx.watch"),
    *("phalanx.launcher.agent", "phalanx.launcher.output.console", "phalanx.launcher.workers"),
}


@pytest.mark.parametrize("options", [(), ("--keep-warm", "1m"), ("--fresh",)], ids=["cold", "warm", "fresh"])
def test_the_fork_server_does_not_wait_for_other_imports(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "main.py").touch()
    words = ("run", "-g", "2", "--cpu", *options, "main.py")
    imported = set(python("-c", UNTIL_THE_START, *words, cwd=str(tmp_path)).out.split())
    assert "phalanx.launcher.node_run" in imported
    assert imported & LATER == set()
