"""The leader file: it can be read back, and invalid content is refused."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.leader_file import LIMIT, LeaderFile, LeaderFilePath
from phalanx.errors import JoinError, UsageError

PLACE = LeaderFilePath(("192.0.2.2", "fd00::2"), 29500)


def spoil(path: Path, **changes: Any) -> None:
    """Change fields of the file. None removes a field."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def test_what_is_announced_is_read_until_it_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "meetings"
    leader, member = LeaderFile(str(folder), "1234.0"), LeaderFile(str(folder), "1234.0")
    assert member.read() is None
    leader.announce(PLACE)
    assert member.read() == PLACE
    assert LeaderFile(str(folder), "1234").read() is None
    assert os.listdir(folder) == ["1234.0.json"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "1234.0.json").stat().st_mode) == 0o600
    member.close()  # a member must not remove the file
    assert member.read() == PLACE
    leader.close()
    leader.close()
    assert os.listdir(folder) == []


def test_a_new_leader_replaces_a_dead_one(tmp_path: Path) -> None:
    dead, alive = LeaderFile(str(tmp_path), "job"), LeaderFile(str(tmp_path), "job")
    dead.announce(PLACE)
    alive.announce(LeaderFilePath(("192.0.2.3",), 1))
    dead.close()  # it was not dead, but the file now belongs to another leader
    assert alive.read() == LeaderFilePath(("192.0.2.3",), 1)
    alive.announce(PLACE)
    assert alive.read() == PLACE


def test_old_files_count_by_default(tmp_path: Path) -> None:
    meeting = LeaderFile(str(tmp_path), "job")
    start = time.time()
    meeting.announce(PLACE)
    assert meeting.read(since=start) == PLACE
    spoil(tmp_path / "job.json", written=start - 10)
    assert meeting.read(since=start) is None
    assert meeting.read(since=start - 20) == PLACE
    assert meeting.read() == PLACE


def test_the_file_names_its_writer(tmp_path: Path) -> None:
    LeaderFile(str(tmp_path), "job").announce(PLACE)
    fields = json.loads((tmp_path / "job.json").read_text())
    assert (fields["host"], fields["pid"]) == (os.uname().nodename, os.getpid())


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": []},
        {"addresses": ["192.0.2.2"] * 65},
        {"addresses": ["gpu-a"]},
        {"addresses": ["192.0.2.2", "$(reboot)"]},
        {"addresses": ["fe80::1%eth0"]},
        {"addresses": ["1" * 5000]},
        {"addresses": [1]},
        {"addresses": None},
        {"port": 0},
        {"port": 65536},
        {"port": "29500"},
        {"port": None},
        {"written": None},
        {"written": "now"},
        {"host": "h" * LIMIT},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_invalid_leader_files_are_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    meeting = LeaderFile(str(tmp_path), "job")
    meeting.announce(PLACE)
    spoil(tmp_path / "job.json", port=1)
    assert meeting.read() == LeaderFilePath(PLACE.addresses, 1)  # a changed file with valid content is accepted
    spoil(tmp_path / "job.json", **changes)
    assert meeting.read() is None


def test_half_a_file(tmp_path: Path) -> None:
    meeting = LeaderFile(str(tmp_path), "job")
    meeting.announce(PLACE)
    whole = (tmp_path / "job.json").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "job.json").write_bytes(whole[:length])
        assert meeting.read() is None
    (tmp_path / "job.json").write_bytes(b"\xff" + whole)
    assert meeting.read() is None


def test_files_that_others_could_have_written(tmp_path: Path) -> None:
    meeting, path = LeaderFile(str(tmp_path), "job"), tmp_path / "job.json"
    meeting.announce(PLACE)
    for mode, place in ((0o620, None), (0o602, None), (0o644, PLACE)):
        path.chmod(mode)
        assert meeting.read() == place
    path.rename(tmp_path / "target")
    path.symlink_to(tmp_path / "target")
    assert meeting.read() is None
    path.unlink()
    path.mkdir()
    assert meeting.read() is None
    path.rmdir()
    os.mkfifo(path, 0o600)
    assert meeting.read() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    meeting = LeaderFile(str(tmp_path), "job")
    meeting.announce(PLACE)
    os.chown(tmp_path / "job.json", 65534, -1)
    assert meeting.read() is None


@pytest.mark.parametrize("job", ["", ".", "..", ".hidden", "../job", "a/b", "a\0b", "a\n", "-x", "a b", "é", "j" * 201])
def test_names_that_are_no_file_of_ours(tmp_path: Path, job: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a file"):
        LeaderFile(str(tmp_path), job)


@pytest.mark.parametrize("job", ["1", "12345_7", "1234.batch", "prterun-gpu-a-77@1", "_", "j" * 200])
def test_names_that_schedulers_give(tmp_path: Path, job: str) -> None:
    meeting = LeaderFile(str(tmp_path), job)
    meeting.announce(PLACE)
    assert meeting.read() == PLACE


@pytest.mark.parametrize(
    "place", [LeaderFilePath((), 1), LeaderFilePath(("gpu-a",), 1), LeaderFilePath(("192.0.2.2",), 0)]
)
def test_an_address_that_would_be_refused_is_not_announced(tmp_path: Path, place: LeaderFilePath) -> None:
    meeting = LeaderFile(str(tmp_path), "job")
    with pytest.raises(ValueError):  # noqa: PT011
        meeting.announce(place)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JoinError, match="Not a directory"):
        LeaderFile(str(tmp_path / "file" / "x"), "job").announce(PLACE)
    (tmp_path / "job.json").mkdir()
    with pytest.raises(JoinError, match="Is a directory"):
        LeaderFile(str(tmp_path), "job").announce(PLACE)
    assert sorted(os.listdir(tmp_path)) == ["file", "job.json"]


def test_readers_never_see_a_partial_file(tmp_path: Path) -> None:
    writer, reader = LeaderFile(str(tmp_path), "job"), LeaderFile(str(tmp_path), "job")
    places = [LeaderFilePath(tuple(f"192.0.2.{number}" for number in range(1, count)), count) for count in (2, 60)]
    writer.announce(places[0])
    ended = threading.Event()

    def write() -> None:
        for number in range(200):
            writer.announce(places[number % 2])
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not ended.is_set():
        seen.add(reader.read())
    thread.join()
    assert seen == set(places)
