"""The output of a script arrives as from `python -u` and from torchrun: every byte, in order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kit.cli import PHALANX, PYTHON, TORCHRUN, environment, phalanx, python, terminal, torchrun

pytestmark = pytest.mark.warmed
ALTERNATING = """
import ctypes, logging, os, subprocess, sys
libc = ctypes.CDLL(None)
logging.basicConfig(level=logging.INFO, format="log %(message)s")
for n in range(50):
    print("out", n)
    print("err", n, file=sys.stderr)
    os.write(1, b"raw out\\n")
    os.write(2, b"raw err\\n")
    logging.info("%d", n)
    libc.printf(b"C %d\\n", n)
    libc.fflush(None)
    subprocess.run(["sh", "-c", "echo child; echo child err >&2"]) if n % 10 == 0 else None
"""

BYTES = """
import os
os.write(1, b"\\x1b[31mred\\n")
os.write(2, b"\\xff\\0 err\\r\\n\\x1b[?25l")
os.write(1, b"\\r 10%\\r 20%\\r100%\\r\\n\\n")
os.write(1, b"no newline, half a character: \\xe2\\x82")
"""


def joined(words: tuple[str, ...], tmp_path: Path) -> bytes:
    """Return the output of `words 2>&1 | cat`."""
    env = environment({"TMPDIR": str(tmp_path)} if words[: len(TORCHRUN)] == TORCHRUN else {})  # it leaves its logs
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=240
    ).stdout


def test_stdout_and_stderr_in_one_pipe_are_in_their_order(tmp_path: Path) -> None:
    script = tmp_path / "alternating.py"
    script.write_text(ALTERNATING)
    plain = joined((*PYTHON, "-u", str(script)), tmp_path)
    logs = ("--log-dir", str(tmp_path / "logs"))
    assert joined((*PHALANX, "run", "-g", "1", "--quiet", *logs, str(script)), tmp_path) == plain
    assert joined((*TORCHRUN, str(script)), tmp_path) == plain
    (folder,) = (tmp_path / "logs").iterdir()
    assert (folder / "attempt_0" / "0" / "stdout.log").read_bytes() == plain
    lines = joined((*PHALANX, "run", "-g", "2", "--quiet", str(script)), tmp_path).splitlines(keepends=True)
    for rank in range(2):
        assert b"".join(line[4:] for line in lines if line.startswith(b"[%d] " % rank)) == plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_stdout_and_stderr_on_a_terminal_are_in_their_order(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "alternating.py"
    script.write_text(ALTERNATING)
    plain = joined((*PYTHON, "-u", str(script)), tmp_path).decode()
    with terminal("run", "-g", str(ranks), "--quiet", str(script), size=(50, 120)) as job:
        assert job.wait() == 0
        shown = re.sub(r"\x1b\[[0-9]*m", "", job.out).replace("\r", "")
    if ranks > 1:
        shown = "".join(line[4:] for line in shown.splitlines(keepends=True) if line.startswith("[0] "))
    assert shown == plain


@pytest.mark.smoke
def test_one_rank_in_a_file_is_byte_for_byte_pythons(tmp_path: Path) -> None:
    script = tmp_path / "bytes.py"
    script.write_text(BYTES)
    plain, ours = python("-u", str(script)), phalanx("run", "-g", "1", "--quiet", str(script))
    assert (ours.raw_out, ours.raw_err) == (plain.raw_out, plain.raw_err)
    assert joined((*PHALANX, "run", "-g", "1", "--quiet", str(script)), tmp_path) == joined(
        (*PYTHON, "-u", str(script)), tmp_path
    )


@pytest.mark.smoke
def test_what_phalanx_says_is_not_on_stdout(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text("print('out', end='')\nraise SystemExit(3)\n")
    ours = phalanx("run", "-g", "1", str(script))
    assert (ours.code, ours.out) == (3, "out")
    assert "phalanx: " in ours.err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_tee_has_the_prefix_of_torchrun(ranks: str, tmp_path: Path) -> None:
    script = tmp_path / "lines.py"
    script.write_text("import sys\nprint('out', 'é')\nprint('err', file=sys.stderr)\nprint('last')\n")
    words = ("--nproc-per-node", ranks, "-t", "3", "--role", "trainer")
    theirs = torchrun(*words, "--log-dir", str(tmp_path / "theirs"), str(script))
    ours = phalanx("run", "--quiet", *words, "--log-dir", str(tmp_path / "ours"), str(script))
    assert sorted(ours.out.splitlines()) == sorted(theirs.out.splitlines())
    assert sorted(ours.err.splitlines()) == sorted(line for line in theirs.err.splitlines() if line.endswith(":err"))
    for name in ("stdout", "stderr"):
        ((kept,), (expected,)) = (list((tmp_path / who).glob(f"**/0/{name}.log")) for who in ("ours", "theirs"))
        assert kept.read_bytes() == expected.read_bytes()
