"""The list of runs for `phalanx ui`: its content, and deletion."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from phalanx.contract.run_metadata import GitState, RunMetadata
from phalanx.errors import UsageError
from phalanx.launcher.runs import summary
from phalanx.launcher.viewers.run_list import LocalRunList
from phalanx.watch.model import simulation
from phalanx.watch.run_list import RunEntry
from tests.watch.finished_run import START, home, left, record_at

METADATA = RunMetadata(
    run="one",
    name="one",
    started=START,
    command=("python", "train.py"),
    script="/home/me/train.py",
    hyperparameters={"lr": 0.1, "amp": True, "note": None},
    git=GitState(root="/home/me", commit="a1" * 20, dirty=True, diff="- secret"),
)


def described(folder: str, metadata: RunMetadata = METADATA) -> None:
    (Path(folder) / "metadata.json").write_bytes(msgspec.json.encode(metadata))


def listed() -> dict[str, RunEntry]:
    return {entry.name: entry for entry in LocalRunList(str(home())).entries()}


def test_what_the_list_says_of_a_run() -> None:
    described(left("one", simulation.run(2, 30)).folder)
    left("two", simulation.run(4, 20, code=1), code=1, ranks=4)
    left("three", simulation.run(2, 5), code=130)
    record_at(left("alive", simulation.begin(2, now=START), code=None), host="another")
    record_at(left("killed", simulation.begin(2, now=START), code=None), started=START + 1)
    found = listed()
    assert next(iter(found)) == "killed"  # the newest first
    one = found["one"]
    assert (one.kind, one.state, one.ranks, one.step, one.command) == ("done", "done", 2, 29, "train.py --lr 0.1")
    assert one.loss is not None
    assert one.metadata is not None
    assert one.metadata.hyperparameters == {"lr": 0.1, "amp": True, "note": None}
    assert one.metadata.git is not None
    assert (one.metadata.git.commit, one.metadata.git.diff) == ("a1" * 20, "")
    assert (found["two"].kind, found["two"].state) == ("failed", "failed (exit code 1)")
    assert (found["three"].kind, found["three"].state, found["three"].why) == ("stopped", "stopped by Ctrl-C", "")
    assert (found["alive"].kind, found["alive"].deletable) == ("elsewhere", False)
    assert (found["killed"].kind, found["killed"].deletable) == ("killed", True)
    assert len({entry.key for entry in found.values()}) == len(found)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"run": 1}', b"[" * 100_000, b"\xff"])
def test_metadata_that_cannot_be_read_are_none(content: bytes) -> None:
    (Path(left("one", simulation.run(2, 5)).folder) / "metadata.json").write_bytes(content)
    assert listed()["one"].metadata is None


def test_files_that_have_not_changed_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page requests the list every other second, and there may be hundreds of runs."""
    record = left("one", simulation.run(2, 5))
    left("two", simulation.run(2, 5))
    asked: list[str] = []
    known = summary.of
    monkeypatch.setattr(summary, "of", lambda record: asked.append(record.id) or known(record))
    runs = LocalRunList(str(home()))
    for _ in range(3):
        runs.entries()
    assert sorted(asked) == ["one", "two"]
    with open(Path(record.folder) / "samples.jsonl", "ab") as file:
        file.write(b"\n")
    runs.entries()
    assert sorted(asked) == ["one", "one", "two"]
    key = next(entry.key for entry in runs.entries() if entry.name == "one")
    assert runs.compared(key) is runs.compared(key)


def test_only_runs_of_the_list_are_deleted_and_no_link_is_followed(tmp_path: Path) -> None:
    record, other = left("one", simulation.run(2, 5)), left("other", simulation.run(2, 5))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("kept")
    (Path(record.folder) / "link").symlink_to(precious)
    elsewhere = left("elsewhere", simulation.run(2, 5), where=tmp_path / "logs")
    os.symlink(elsewhere.folder, home() / "runs" / "elsewhere")
    runs = LocalRunList(str(home()))
    entries = {entry.name: entry for entry in runs.entries()}
    for key in ("", "..", "one", record.folder, "0" * 16):
        with pytest.raises(UsageError, match="no longer in the list"):
            runs.delete(key)
    assert not entries["elsewhere"].deletable
    with pytest.raises(UsageError, match="is not below"):
        runs.delete(entries["elsewhere"].key)
    with pytest.raises(UsageError, match="not on loopback"):
        LocalRunList(str(home()), read_only=True).delete(entries["one"].key)
    record_at(other, pid=os.getpid(), pid_started=_started(), ended=None, code=None)
    with pytest.raises(UsageError, match="is running"):
        runs.delete(entries["other"].key)
    runs.delete(entries["one"].key)
    assert sorted(listed()) == ["elsewhere", "other"]
    assert (precious / "data").read_text() == "kept"
    assert Path(elsewhere.folder).exists()


def _started() -> int:
    from phalanx.forkserver import linux

    found = linux.start_time(os.getpid())
    assert found is not None
    return found
