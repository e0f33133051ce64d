"""`phalanx tour`: the picture, on real ranks; and the report of a wrong result."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from phalanx.demo import scenes
from phalanx.demo.scenes import SCENES, TourScene
from tests.kit.cli import alive, descendants, phalanx, terminal, until


def values(row: scenes.TourRow) -> list[scenes.Value]:
    return ["?" if cell is None else cell.value for cell in row]


def test_the_whole_tour_in_a_pipe() -> None:
    result = phalanx("tour")
    assert result.code == 0, result.err
    assert result.err == ""
    assert f"{len(SCENES)} of {len(SCENES)} as shown" in result.out
    assert "\x1b" not in result.out
    assert "Colors" not in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    for scene in SCENES:
        assert re.search(rf"^{scene.name}  {re.escape(scene.title)}$", result.out, re.MULTILINE)


@pytest.mark.smoke
def test_one_scene_line_by_line() -> None:
    result = phalanx("tour", "all_to_all", "--ranks", "3")
    assert result.code == 0, result.err
    assert [line.split() for line in result.out.splitlines()[2:8]] == [
        ["all_to_all", "each", "rank", "sends", "a", "piece", "to", "each:", "rows", "become", "columns"],
        ["received", "=", "torch.empty_like(t)"],
        ["dist.all_to_all_single(received,", "t)"],
        ["rank", "0", "0", "1", "2", "→", "0", "10", "20"],
        ["rank", "1", "10", "11", "12", "→", "1", "11", "21"],
        ["rank", "2", "20", "21", "22", "→", "2", "12", "22"],
    ]


def test_where_arrows_cannot_be_written() -> None:
    result = phalanx("tour", "reduce", "--ranks", "2", env={"PYTHONIOENCODING": "ascii"})
    assert result.code == 0, result.err
    assert [line.split() for line in result.out.splitlines()[4:6]] == [
        ["rank", "0", "0", "1", "->", "10", "12"],
        ["rank", "1", "10", "11", "->", ".", "."],
    ]


def test_in_a_terminal_a_number_has_the_colour_of_its_rank() -> None:
    job = terminal("tour", "broadcast", "--ranks", "2")
    assert job.wait() == 0
    row = next(line for line in job.out.splitlines() if "→" in line)
    assert "\x1b[36m   0\x1b[0m" in row  # rank 0's own
    assert "\x1b[32m  10\x1b[0m" in row  # rank 1's
    assert "Colors:" in job.out


def test_the_most_ranks_still_fit() -> None:
    result = phalanx("tour", "all_to_all", "all_gather_into_tensor", "send_recv", "groups", "--ranks", "8")
    assert result.code == 0, result.err
    assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.smoke
def test_list() -> None:
    result = phalanx("tour", "--list")
    assert [line.split()[0] for line in result.out.splitlines()] == list(scenes.NAMES)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "message"),
    [(("allreduce",), "fix: phalanx tour all_reduce"), (("--ranks", "1"), "2 to 8"), (("--ranks", "9"), "2 to 8")],
)
def test_invalid_arguments_are_refused(words: tuple[str, ...], message: str) -> None:
    result = phalanx("tour", *words)
    assert result.code == 2
    assert message in result.err


@pytest.mark.smoke
@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene.after], ids=lambda scene: scene.name)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_wrong_number_is_found(scene: TourScene, world: int) -> None:
    before = [values(scene.before(rank, world)) for rank in range(world)]
    after = [values(scenes.expected(scene, rank, world)) for rank in range(world)]
    assert scenes.faults(scene, before, after) == []
    spoiled = [*after[:-1], [*after[-1], 99]]
    assert [rank for rank, _ in scenes.faults(scene, before, spoiled)] == [world - 1]
    spoiled = [[-1, *after[0][1:]], *after[1:]]
    assert [rank for rank, _ in scenes.faults(scene, before, spoiled)] == [0]


def test_a_barrier_that_someone_left_too_early() -> None:
    barrier = next(scene for scene in SCENES if scene.name == "barrier")
    assert scenes.faults(barrier, [[0], [30]], [[31], [30]]) == []
    assert scenes.faults(barrier, [[0], [30]], [[29], [30]]) != []


def test_ctrl_c_ends_it_quietly() -> None:
    job = terminal("tour", "--ranks", "8")
    job.wait_for("Colors")
    pids = until(lambda: len(found := descendants(job.pid)) > 5 and found, 30, "ranks")
    job.send(b"\x03")
    assert job.wait() == 130
    assert not any(map(alive, pids))
    assert "Traceback" not in job.out


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    """Simulates a torch that does not support it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'phalanx.demo.tour' in sys.orig_argv:\n"
        "    import torch.distributed as dist\n"
        "    def refuse(*_, **__): raise RuntimeError('no such thing here')\n"
        "    dist.all_to_all_single = refuse\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = phalanx("tour", "all_to_all", "--ranks", "2", env={"PYTHONPATH": path})
    assert result.code == 1
    assert re.search(r"phalanx: rank [01] of 2: RuntimeError: no such thing here", result.err)
