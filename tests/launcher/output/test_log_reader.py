"""Parts of the logs of ranks, and searches in them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from phalanx.contract import events
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.watch.source import SearchResult


def test_a_log_is_read_in_parts(tmp_path: Path) -> None:
    text = "".join(f"line {number} äöü€\n" for number in range(10_000))
    (tmp_path / "stdout.log").write_text(text)
    found, at = "", 0
    while True:
        part = log_reader.part(str(tmp_path), "stdout", at, 1000)
        assert part.start == at
        if not part.text:
            break
        found, at = found + part.text, part.end
    assert found == text
    last = log_reader.part(str(tmp_path), "stdout", None, 100)
    assert last.text.startswith("line ")
    assert text.endswith(last.text)
    assert len(log_reader.part(str(tmp_path), "stdout", 0, 1 << 30).text.encode()) <= log_reader.PART
    beyond = log_reader.part(str(tmp_path), "stdout", 1 << 40)
    assert (beyond.start, beyond.end, beyond.text) == (len(text.encode()), len(text.encode()), "")
    with open(tmp_path / "stdout.log", "ab") as file:
        file.write("half €".encode()[:-1])  # and the rest of it a moment later
        file.flush()
        half = log_reader.part(str(tmp_path), "stdout", beyond.end)
        file.write("half €".encode()[-1:])
        file.flush()
        rest = log_reader.part(str(tmp_path), "stdout", half.end)
        assert (half.text, rest.text) == ("half ", "€")
    (tmp_path / "stdout.log").write_bytes(b"ended\xe2")
    half = log_reader.part(str(tmp_path), "stdout", 0)
    assert (half.text, log_reader.part(str(tmp_path), "stdout", half.end).text) == ("ended", "\ufffd")
    assert log_reader.part(str(tmp_path), "stderr", None).text == ""
    assert log_reader.part(None, "stdout", 3).text == ""


def test_a_search_is_bounded_and_names_its_limits(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_reader, "SEARCHED", 1 << 16)
    monkeypatch.setattr(log_reader, "_BLOCK", 1 << 10)
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    lines = [f"line {number}" + " Needle" * (number % 1000 == 0) for number in range(20_000)]
    (tmp_path / "0" / "stdout.log").write_text("\n".join(lines))
    (tmp_path / "1" / "stderr.log").write_text("x" * 5000 + "needle" + "y" * 5000)
    places = {rank: str(tmp_path / str(rank)) for rank in (0, 1)}
    *found, note = log_reader.search(places, "needle", 100)
    assert note == SearchResult(rank=-1, stream="stdout", at=0, line="only the last 0 MiB of rank 0 were searched")
    assert [line.line for line in found[:-1]] == [f"line {number} Needle" for number in range(15_000, 20_000, 1000)]
    text = (tmp_path / "0" / "stdout.log").read_bytes()
    assert all(text[line.at :].startswith(line.line.encode()) for line in found[:-1])
    assert found[-1].rank == 1
    assert found[-1].line.startswith("needle")
    assert len(found[-1].line) <= log_reader._LINE
    *few, limit, _ = log_reader.search(places, "needle", 2)
    assert [(line.rank, line.line[:10]) for line in few] == [(0, "line 19000"), (1, "needleyyyy")]
    assert limit.line == "only 2 lines are shown, of more"
    assert "the search timed out" in log_reader.search(places, "needle", 2, timeout=-1.0)[-1].line


def test_the_log_of_a_rank_is_the_last_it_wrote_to(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    for name in ("0", "1", "spare.2"):
        (Path(folder.rank_folder(0, name)) / "stdout.log").write_text(name)
    for number, (rank, spare) in enumerate(((0, False), (1, False), (1, True))):
        folder.event(events.WorkerStarted(time=1.0, rank=rank, pid=10 + number, spare=spare))
    assert {rank: Path(path).name for rank, path in log_reader.folders(str(tmp_path)).items()} == {0: "0", 1: "1"}
    os.utime(tmp_path / "attempt_0" / "spare.2" / "stdout.log", (time.time(), time.time() + 9))
    folder.event(events.RankChanged(time=2.0, rank=1, pid=12, previous_rank=1))
    assert {rank: Path(path).name for rank, path in log_reader.folders(str(tmp_path)).items()} == {0: "0", 1: "spare.2"}
    folder.close()
