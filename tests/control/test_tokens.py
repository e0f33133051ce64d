"""The token: where it is searched, which tokens are refused, and concurrent creation of the first one."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.control import tokens
from phalanx.control.tokens import Token
from phalanx.errors import TokenError
from tests.kit.users import as_root

A, B = "a1" * 32, "b2" * 32


def keep(path: Path, text: str = A, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("environ", "file", "open_", "key", "origin"),
    [
        ({"PHALANX_TOKEN": A}, "file", True, "", "nowhere (--no-auth)"),
        ({"PHALANX_TOKEN": f" {A.upper()}\n"}, "file", False, A, "PHALANX_TOKEN"),
        ({}, "file", False, B, "{tmp}/file"),
    ],
)
def test_the_first_source_counts(
    tmp_path: Path, environ: dict[str, str], file: str, open_: bool, key: str, origin: str
) -> None:
    keep(tmp_path / file, f"{B}\n")
    token = tokens.find(environ, file=str(tmp_path / file), home=str(tmp_path / "home"), open_=open_)
    assert (token.key.hex(), token.origin) == (key, origin.format(tmp=tmp_path))
    assert not (tmp_path / "home").exists()


def test_the_own_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    home = tmp_path / "state" / "phalanx"
    old = os.umask(0o077 ^ 0o777)  # denies the owner everything and allows others everything
    try:
        first = tokens.find({}, file=None, home=str(home))
    finally:
        os.umask(old)
    assert first == tokens.find({}, file=None, home=str(home))
    assert (len(first.key), first.origin) == (32, f"{home}/token")
    assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
    assert os.listdir(home) == ["token"]
    assert tokens.find({}, file=None, home=str(tmp_path / "other")).key != first.key


def test_the_own_folder_is_private(tmp_path: Path) -> None:
    tokens.find({}, file=None, home=str(tmp_path / "phalanx"))
    assert stat.S_IMODE((tmp_path / "phalanx").stat().st_mode) == 0o700


def test_the_key_is_not_shown() -> None:
    token = tokens.read_text(A, "PHALANX_TOKEN")
    assert token == Token(bytes.fromhex(A), "PHALANX_TOKEN")
    for text in (repr(token), str(token), token.fingerprint):
        assert "a1a1" not in text
    assert len(token.fingerprint) == 8
    assert token.fingerprint == tokens.read_text(A, "a file").fingerprint != tokens.read_text(B, "").fingerprint
    assert str(token) == f"PHALANX_TOKEN (fingerprint {token.fingerprint})"


def test_new_tokens_differ_and_can_be_read() -> None:
    texts = {tokens.new() for _ in range(10)}
    assert len({tokens.read_text(text, "new").key for text in texts}) == 10


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("secret", "it has 6 characters"),
        (A[:-1], "it has 63 characters"),
        (A + "c", "it has 65 characters"),
        ("secret" + A[6:], "some of them are not hexadecimal digits"),
        ("é" * 64, "some of them are not hexadecimal digits"),
        ("٣" * 64, "some of them are not hexadecimal digits"),
        (f"{A[:32]}\n{A[32:]}", "it has 65 characters"),
    ],
)
def test_a_malformed_variable(text: str, seen: str) -> None:
    with pytest.raises(TokenError) as error:
        tokens.find({"PHALANX_TOKEN": text}, file=None, home="/nowhere")
    assert seen in str(error.value)
    assert "export PHALANX_TOKEN=$(openssl rand -hex 32)" in error.value.fix
    for part in ("secret", "a1a1", "é", "٣"):
        assert part not in str(error.value)


@pytest.mark.parametrize(
    ("text", "mode", "seen"),
    [
        ("", 0o600, "it is empty"),
        ("hunter2\n", 0o600, "it has 7 characters"),
        ("\N{SNOWMAN}" * 64, 0o600, "a token is 64 hexadecimal digits"),
        (A * 1000, 0o600, "a token is 64 hexadecimal digits"),
        (A, 0o640, "its mode is 640"),
        (A, 0o602, "its mode is 602"),
        (A, 0o4755, "its mode is 4755"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, text: str, mode: int, seen: str) -> None:
    path = keep(tmp_path / "my token", text, mode)
    with pytest.raises(TokenError) as error:
        tokens.find({}, file=path, home="/nowhere")
    assert path in error.value.what
    assert seen in str(error.value)
    if mode != 0o600:
        assert error.value.fix == f"chmod 600 '{path}'"
    else:
        # the user may have named this file by mistake, so do not suggest to delete it
        assert path not in error.value.fix
        assert "--token-file NEW" in error.value.fix
    for part in ("hunter2", "a1a1", "\N{SNOWMAN}"):
        assert part not in str(error.value)


def test_the_suggested_commands_work(tmp_path: Path) -> None:
    path = f"{tmp_path}/my token"
    with pytest.raises(TokenError) as missing:
        tokens.find({}, file=path, home="/nowhere")
    subprocess.run(["sh", "-c", missing.value.fix.rpartition(": ")[2]], check=True)
    assert len(tokens.find({}, file=path, home="/nowhere").key) == 32
    os.chmod(path, 0o644)
    with pytest.raises(TokenError) as loose:
        tokens.find({}, file=path, home="/nowhere")
    subprocess.run(["sh", "-c", loose.value.fix], check=True)
    assert len(tokens.find({}, file=path, home="/nowhere").key) == 32


def test_a_token_path_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, seen in (
        (".", "is a folder"),
        ("pipe", "is not a plain file"),
        ("gone", "there is no token file"),
        ("dangling", "a link to a file that is not there"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
    ):
        with pytest.raises(TokenError, match=seen) as error:
            tokens.find({}, file=f"{tmp_path}/{name}", home="/nowhere")
        assert error.value.fix


def test_links_are_followed_to_what_is_sound(tmp_path: Path) -> None:
    target = Path(keep(tmp_path / "target"))
    (tmp_path / "link").symlink_to(target)
    assert tokens.find({}, file=f"{tmp_path}/link", home="/nowhere").key.hex() == A
    target.chmod(0o644)
    with pytest.raises(TokenError, match="open to other users"):
        tokens.find({}, file=f"{tmp_path}/link", home="/nowhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    path = keep(tmp_path / "token")
    os.chown(path, 65534, -1)
    with pytest.raises(TokenError, match="belongs to another user") as error:
        tokens.find({}, file=path, home="/nowhere")
    assert "its owner is user 65534, this process runs as user 0" in error.value.details


@as_root
def test_a_file_that_may_not_be_read() -> None:
    # In a separate process, because this one must stay root.
    script = (
        "import os\nfrom phalanx.control import tokens\nos.setuid(65534)\ntokens.find({}, file='/etc/shadow', home='/')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "TokenError: the token file /etc/shadow cannot be read: Permission denied" in done.stderr


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenError, match=r"the token cannot be written to .*: Not a directory") as error:
        tokens.find({}, file=None, home=str(tmp_path / "file" / "home"))
    assert "PHALANX_HOME" in error.value.fix


def test_a_spoilt_own_file_is_reported_and_kept(tmp_path: Path) -> None:
    keep(tmp_path / "token", "x" * 64)
    with pytest.raises(TokenError, match="is not valid") as error:
        tokens.find({}, file=None, home=str(tmp_path))
    assert error.value.fix.startswith(f"rm {tmp_path}/token ")
    assert (tmp_path / "token").read_text() == "x" * 64


def test_an_invalid_token_from_ssh_is_refused() -> None:
    with pytest.raises(TokenError, match="the token from ssh is not valid") as error:
        tokens.read_text("secret", "ssh")
    assert error.value.fix == tokens.EXPORT


def test_half_a_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "token", "")
    monkeypatch.setattr(tokens, "PATIENCE", 30)
    asleep = threading.Event()
    monkeypatch.setattr(tokens.time, "sleep", lambda _: asleep.set())
    found: list[Token] = []
    waiter = threading.Thread(target=lambda: found.append(tokens.find({}, file=None, home=str(tmp_path))))
    waiter.start()
    assert asleep.wait(30)
    assert not found
    (tmp_path / "token").write_text(A)
    waiter.join(30)
    assert found[0].key.hex() == A


def test_an_empty_file_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "token", "")
    monkeypatch.setattr(tokens, "PATIENCE", 0.05)
    with pytest.raises(TokenError, match="is not valid"):
        tokens.find({}, file=None, home=str(tmp_path))


def test_without_links_the_first_token_is_made_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", link)
    first = tokens.find({}, file=None, home=str(tmp_path))
    assert os.listdir(tmp_path) == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    tokens._create(str(tmp_path / "token"), B)  # another node, a moment later
    assert tokens.find({}, file=None, home=str(tmp_path)) == first


@pytest.mark.parametrize("links", [True, False])
def test_fifty_processes_make_one_token(tmp_path: Path, links: bool) -> None:
    """They are forked and held at a pipe, so that they start at the same time."""
    gate, opener = os.pipe()
    out, answers = os.pipe()
    home = str(tmp_path / "home")
    pids = []
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            _race(gate, opener, answers, home, links)
        pids.append(pid)
    os.close(gate)
    os.close(answers)
    os.close(opener)  # all start now
    with os.fdopen(out) as stream:
        lines = stream.read().split()
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert codes == [0] * 50
    assert len(lines) == 50
    assert len(set(lines)) == 1
    assert os.listdir(home) == ["token"]


def _race(gate: int, opener: int, answers: int, home: str, links: bool) -> None:
    code = 1
    try:
        os.close(opener)
        if not links:
            tokens.os.link = _no_link  # type: ignore[attr-defined]
        os.read(gate, 1)
        key = tokens.find({}, file=None, home=home).key
        os.write(answers, f"{key.hex()}\n".encode())
        code = 0
    finally:
        os._exit(code)


def _no_link(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
