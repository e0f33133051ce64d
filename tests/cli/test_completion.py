"""The completion scripts. The one for bash runs in bash: as a function, and with the tab key."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from phalanx.cli.options import HelpRequested, parse_run
from phalanx.cli.options.completion import completion
from phalanx.cli.options.table import OPTIONS, options_of

DASHED = {name for option in options_of("run") for name in option.shown}


def complete(words: list[str], folder: Path) -> list[str]:
    """Return what bash offers for the last of these words, split as bash splits them."""
    program = f"""{completion("bash")}
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        _phalanx
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", *words],
        cwd=folder, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["phalanx", "ru"], {"run"}),
        (["phalanx", "run", "--nproc"], {"--nproc-per-node"}),
        (["phalanx", "run", "--nproc_"], {"--nproc_per_node"}),
        (["phalanx", "run", "--nproc-per-node", ""], {"auto", "gpu", "cpu", "xpu"}),
        (["phalanx", "run", "--nproc_per_node", "g"], {"gpu"}),
        (["phalanx", "run", "--color", "=", "a"], {"auto", "always"}),
        (["phalanx", "run", "--color", "="], {"auto", "always", "never"}),
        (["phalanx", "run", "--pass-local-rank", "=", "u"], {"underscore"}),
        (["phalanx", "run", "--rdzv-backend", "e"], {"etcd", "etcd-v2"}),
        (["phalanx", "run", "--stdin", ""], {"none"}),
        (["phalanx", "run", "-g", ""], set()),
        (["phalanx", "run", "-g", "4", "-"], DASHED),
        (["phalanx", "run", "--json"], set()),
        (["phalanx", "plan", "--js"], {"--json"}),
        (["phalanx", "chaos", "--kill"], {"--kill-every"}),
        (["phalanx", "chaos", "--kill-every", "5s", "t"], {"train.py"}),
        (["phalanx", "run", "--snap"], {"--snapshot-every"}),
        (["phalanx", "run", "--snapshot-every", ""], {"off"}),
        (["phalanx", "run", "--log-dir", ""], {"folder"}),
        (["phalanx", "run", "--log-dir", "=", "f"], {"folder"}),
        (["phalanx", "run", ""], {"train.py", "folder"}),
        (["phalanx", "run", "--cpu", "t"], {"train.py"}),
        (["phalanx", "run", "--color", "=", "auto", "t"], {"train.py"}),
        # after the script: files for the script, and no options of phalanx
        (["phalanx", "run", "-g", "4", "train.py", ""], {"train.py", "my notes.txt", "folder"}),
        (["phalanx", "run", "train.py", "my"], {"my notes.txt"}),
        (["phalanx", "run", "train.py", "--n"], set()),
        (["phalanx", "run", "train.py", "--color", "a"], set()),
        (["phalanx", "stop", "--n"], set()),
    ],
)
def test_bash_offers(words: list[str], offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "my notes.txt").touch()
    (tmp_path / "folder").mkdir()
    assert set(complete(words, tmp_path)) == (offered or {""})


def test_the_tab_key(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(completion("bash"))
    keyboard, terminal = pty.openpty()
    fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 300, 0, 0))  # wide enough that no line wraps
    environ = {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "> ", "HOME": str(tmp_path), "INPUTRC": "/dev/null"}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environ, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        os.write(keyboard, f"source {script}; echo rea''dy\n".encode())
        seen = _read_until(keyboard, b"ready")
        os.write(keyboard, b"echo phalanx; phalanx run --max-r\t5 --color=n\t--rdzv-b\tc1\t")
        seen = _read_until(keyboard, b"c10d")
        assert b"phalanx run --max-restarts 5 --color=never --rdzv-backend c10d" in seen
    finally:
        shell.kill()
        shell.wait()
        os.close(keyboard)


def _read_until(keyboard: int, wanted: bytes) -> bytes:
    seen = b""
    end = time.monotonic() + 20
    while wanted not in seen:
        ready, _, _ = select.select([keyboard], [], [], end - time.monotonic())
        assert ready, seen
        seen += os.read(keyboard, 4096)
    return seen


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_option_is_in_every_script(shell: str) -> None:
    with pytest.raises(HelpRequested) as caught:
        parse_run(["--print-completion", shell], {})
    assert caught.value.text == completion(shell)
    for option in OPTIONS:
        if not option.only:
            assert option.name[2:] in caught.value.text
    assert "@VER" not in caught.value.text


def test_the_script_is_one_that_bash_reads() -> None:
    subprocess.run(["bash", "-n"], input=completion("bash"), text=True, check=True, timeout=120)
