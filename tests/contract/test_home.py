"""Which home folder is used, for each state of the environment and the disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from phalanx.contract.home import home, is_temporary, preferred
from phalanx.errors import LaunchError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"phalanx-{os.getuid()}"


@pytest.mark.parametrize(
    ("environ", "user", "expected"),
    [
        ({"PHALANX_HOME": "/dev/null/x", "XDG_STATE_HOME": "/dev/null"}, "{}", "/dev/null/x"),  # the error names it
        ({"XDG_STATE_HOME": "{}/state"}, "/dev/null", "{}/state/phalanx"),
        ({"XDG_STATE_HOME": "relative"}, "{}/user", "{}/user/.local/state/phalanx"),
        ({}, "{}/user", "{}/user/.local/state/phalanx"),
        ({}, "/dev/null", "{}/phalanx-UID"),
        ({}, "relative", "{}/phalanx-UID"),  # "~" is not expanded if the user has no entry in /etc/passwd
    ],
)
def test_the_folder(
    environ: dict[str, str], user: str, expected: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(temporary.parent)
    monkeypatch.setenv("HOME", user.format(root))
    found = home({name: value.format(root) for name, value in environ.items()})
    assert found == expected.format(root).replace("UID", str(os.getuid()))
    assert is_temporary(found) == expected.endswith("UID")
    assert [entry.name for entry in temporary.parent.iterdir()] == [temporary.name] * is_temporary(found)


def test_the_temporary_folder_is_private_and_found_again(temporary: Path) -> None:
    environ = {"XDG_STATE_HOME": "/dev/null"}
    assert home(environ) == home(environ) == str(temporary)
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert preferred(environ) == "/dev/null/phalanx"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
@pytest.mark.parametrize("inside", ["", "runs", "warm", "hints"])
def test_a_home_of_another_user_is_refused(inside: str, tmp_path: Path, temporary: Path) -> None:
    given = tmp_path / "phalanx"
    (given / inside).mkdir(parents=True)
    assert home({"PHALANX_HOME": str(given)}) == str(given)
    os.chown(given / inside, 12345, -1)
    with pytest.raises(LaunchError, match=r"PHALANX_HOME is .*belongs to another user") as refused:
        home({"PHALANX_HOME": str(given)})
    assert "its owner is user 12345" in str(refused.value)
    assert home({"XDG_STATE_HOME": str(tmp_path)}) == str(temporary)


@pytest.mark.parametrize("taken", ["link", "open to others", "another user", "file"])
def test_a_folder_that_others_can_write_is_refused(taken: str, temporary: Path) -> None:
    match taken:
        case "link":
            (temporary.parent / "theirs").mkdir(mode=0o700)
            temporary.symlink_to("theirs")
        case "open to others":
            temporary.mkdir()
            temporary.chmod(0o770)
        case "another user":
            temporary.mkdir(mode=0o700)
            if os.getuid() != 0:
                pytest.skip("only root can make a folder of another user's")
            os.chown(temporary, 12345, -1)
        case "file":
            temporary.touch()
    with pytest.raises(LaunchError, match="is not safe to keep runs in"):
        home({"XDG_STATE_HOME": "/dev/null"})
