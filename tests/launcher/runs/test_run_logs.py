"""The output of a run from its files: which workers exist, whole lines, the last lines, no control characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.contract import events
from phalanx.launcher.runs import run_logs
from phalanx.launcher.runs.run_logs import KnownRanks, LogFile, WorkerLog


def test_workers_are_found_by_attempt_rank_and_generation(tmp_path: Path) -> None:
    for path in (
        "attempt_1/0",
        "attempt_0/10",
        "attempt_0/2",
        "attempt_0/2.1",
        "attempt_0/spare.2",
        "node_1/attempt_0/3",
    ):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "stall_0").mkdir()
    started = [
        events.WorkerStarted(time=1.0, rank=rank, pid=pid, attempt=0, spare=spare)
        for rank, pid, spare in ((2, 5, False), (10, 6, False), (0, 7, True))
    ]
    seated = events.RankChanged(time=2.0, rank=10, pid=7, previous_rank=0)
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(events.encode, [*started, seated])))
    found = [(log.attempt, log.rank, log.generation, Path(log.folder).name) for log in run_logs.find(str(tmp_path))]
    assert found == [
        (0, 2, 0, "2"),
        (0, 2, 1, "2.1"),
        (0, 3, 0, "3"),
        (0, 10, 0, "10"),
        (0, 10, 0, "spare.2"),
        (1, 0, 0, "0"),
    ]


def test_lines_come_whole_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    log = LogFile(WorkerLog(0, 0, 0, str(tmp_path)), "stdout")
    assert list(log.new_lines()) == []  # the file does not exist yet
    with path.open("ab", buffering=0) as file:
        file.write("one\ntwö".encode()[:-1])
        assert list(log.new_lines()) == ["one"]
        file.write("twö".encode()[-1:] + b"\nthree")
        assert list(log.new_lines()) == ["twö"]
    assert list(log.new_lines()) == []
    assert list(log.last_line()) == ["three"]
    path.write_bytes(b"")  # as `: > stdout.log` does
    assert list(log.new_lines()) == []
    path.write_bytes(b"four\n")
    assert list(log.new_lines()) == ["four"]
    path.write_bytes(b"x" * (3 << 20))
    lines = list(LogFile(WorkerLog(0, 0, 0, str(tmp_path)), "stdout").new_lines())
    assert (len(lines), {len(line) for line in lines}) == (3, {1 << 20})  # memory is bounded


@pytest.mark.parametrize("content", ["", "a", "a\n", "a\nb", "a\nb\n", "\n\n\n", "x" * 100_000 + "\n" + "y\n" * 40_000])
@pytest.mark.parametrize("lines", [0, 1, 2, 50_000])
def test_the_last_lines(tmp_path: Path, content: str, lines: int) -> None:
    (tmp_path / "stdout.log").write_text(content)
    log = LogFile(WorkerLog(0, 0, 0, str(tmp_path)), "stdout", tail=lines)
    assert [*log.new_lines(), *log.last_line()] == content.splitlines()[-lines:] * (lines > 0)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"plain text", "plain text"),
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        (b"\x1bPq#0;2\x1b\\a\x1bc\x9bb", "a\ufffdb"),
        ("\x9b31mred\u202eevil".encode(), "red evil"),
        (b"10%\r50%\r100%\r", "100%"),
        (b"a\tb\x00c\x08", "a\tb c"),
        (b"\xff", "\ufffd"),
    ],
)
def test_control_characters_are_removed_from_logs(written: bytes, shown: str) -> None:
    assert run_logs.harmless(written) == shown


def test_ranks_of_other_hosts_are_known_from_events(tmp_path: Path) -> None:
    known = KnownRanks(str(tmp_path))
    assert known.read() == set()
    nodes = [events.NodeRanks(node=node, ranks=(events.RankInfo(rank=7 * node),)) for node in range(2)]
    infos = events.RankInfos(time=1.0, nodes=tuple(nodes))
    line = events.encode(infos)
    (tmp_path / "events.jsonl").write_bytes(line[:20])
    assert known.read() == set()
    (tmp_path / "events.jsonl").write_bytes(line)
    assert known.read() == {0, 7}
