"""--check-collectives: ranks that differ are stopped at once, with both call sites; healthy runs continue."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import codes, texts, together
from tests.e2e.places import script
from tests.kit.cli import phalanx, warm_environment
from tests.kit.lab import Lab

pytestmark = pytest.mark.xdist_group("checker")  # they share a warm fork server
CHECK = ("--cpu", "--check-collectives")
REPORT = re.compile(r"^phalanx: rank (\d) failed: (.*\n(?:  .*\n)+)", re.MULTILINE)
SURVIVE = str(Path(__file__).parents[2] / "train" / "scripts" / "survive.py")

# Blamed ranks per mismatch, of ranks 0 to 2, in the order of scripts/differ.py; None: another failure.
FOUND = (
    ("op", "rank 1 called broadcast where ranks 0, 2 called all_reduce (collective 41 of all ranks)"),
    ("shape", "rank 2 called all_reduce(float32 [12], SUM) where ranks 0, 1 called all_reduce(float32 [10], SUM)"),
    ("other", None),
    ("dtype", "rank 0 called all_reduce(int32 [10], SUM) where ranks 1, 2 called all_reduce(float32 [10], SUM)"),
    ("skipped", "rank 1 called barrier where ranks 0, 2 called all_reduce"),
    ("other", None),
    (
        "subgroup",
        "rank 2 called reduce(float32 [10], SUM, root 2) where rank 0 called reduce(float32 [10], SUM, root 0) "
        "(collective 2 of group 1, ranks 0, 2)",
    ),
    ("bucket", "rank 0 called all_reduce(float32 [], SUM) where ranks 1, 2 called all_reduce(float32 [11], SUM)"),
)

# The same without the option, for phalanx's own groups: the call, its explanation, and the lines.
NOTICED = (
    (
        "op",
        "ranks 0 and 2 all_reduce of 10 float32 (SUM), rank 1 broadcast of 10 float32 from rank 0",
        r"rank 1 called broadcast at differ.py:\d+ in op where the other 2 called all_reduce at differ.py:\d+ in op",
        ["dist.all_reduce(x)", "dist.broadcast(x, 0)"],
    ),
    (
        "subgroup",
        "rank 0 reduce of 10 float32 (SUM) to rank 0, rank 2 (of this group: 1) reduce of 10 float32 (SUM) to rank 2",
        r"roots differ in reduce #2 at differ.py:\d+ in subgroup: rank 2 has root 2, the other one .rank 0. has root 0",
        ["dist.reduce(x, rank, group=group)"],
    ),
    (
        "bucket",
        "rank 0 all_reduce of 1 float32 (SUM), ranks 1 and 2 all_reduce of 11 float32 (SUM)",
        r"rank 0 called one more collective than the others, all_reduce #44 inside `if rank == 0` at differ.py:\d+",
        ["dist.all_reduce(loss.detach())", "loss.backward()"],
    ),
)


@pytest.fixture(scope="module")
def warm() -> Iterator[dict[str, str | None]]:
    with warm_environment("torch._dynamo") as env:
        yield dict(env)


def test_a_mismatch_is_reported_at_once_with_both_places(warm: dict[str, str | None]) -> None:
    times = ("--max-restarts", str(len(FOUND) - 1))
    kinds = ",".join(kind for kind, _ in FOUND)
    done = phalanx("run", "-g", "3", *CHECK, *times, script("differ.py"), kinds, "gloo,shm", env=warm, timeout=120)
    assert done.code == 1
    assert "nobody has noticed" not in done.out
    reports = REPORT.findall(done.err)
    assert len(reports) == len(FOUND), done.err
    for (_, text), (_, expected) in zip(reports, FOUND, strict=True):
        assert text.startswith(f"CollectiveMismatchError: {expected}" if expected else "ValueError"), text
    # Reported by the wrong rank, with the lines of both.
    rank, text = reports[0]
    assert rank == "1"
    both = r"  rank 1: broadcast\(float32 \[10\], root 0\) at \S+/differ.py:\d+\n      dist.broadcast\(x, 0\)\n"
    both += r"  ranks 0, 2: all_reduce\(float32 \[10\], SUM\) at \S+/differ.py:\d+\n      dist.all_reduce\(x\)\n"
    assert re.search(both, text), text
    assert "loss.backward()" in reports[7][1]  # DDP calls it in C++


def test_groups_of_ours_need_not_be_asked(warm: dict[str, str | None]) -> None:
    words = ("--max-restarts", str(len(NOTICED) - 1), script("differ.py"), ",".join(kind for kind, *_ in NOTICED))
    done = phalanx("run", "-g", "3", "--cpu", *words, "shm", env=warm, timeout=120)
    assert done.code == 1
    assert "nobody has noticed" not in done.out
    reports = REPORT.findall(done.err)
    assert len(reports) == len(NOTICED), done.err
    for (_, text), (_, expected, means, lines) in zip(reports, NOTICED, strict=True):
        headline, meant, *_ = text.splitlines()
        assert f"ranks called different things: {expected}" in headline
        assert re.match(f"  {means}", meant), text
        assert re.findall(r"^ +ranks? [\d, ]+: \S+/differ.py:\d+\n      (.*)$", text, re.MULTILINE) == lines, text


def test_healthy_ranks_get_the_same_from_every_collective(warm: dict[str, str | None], tmp_path: Path) -> None:
    found = []
    for name, options in (("checked", CHECK), ("plain", ("--cpu",))):
        (tmp_path / name).mkdir()
        done = phalanx("run", "-g", "3", *options, script("collectives.py"), str(tmp_path / name), env=warm)
        assert done.code == 0, done.err
        found.append([json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in range(3)])
    assert found[0] == found[1]
    assert all(len(one) > 40 for one in found[0])


def test_a_group_that_forms_again_counts_again(warm: dict[str, str | None], tmp_path: Path) -> None:
    words = ("-g", "2", *CHECK, SURVIVE, str(tmp_path), json.dumps([[5, 1, "kill"]]))
    done = phalanx("run", *words, env=warm)
    assert done.code == 0, done.err
    assert "regrouped" in done.err


@pytest.mark.warmed
def test_on_two_nodes_they_are_compared_through_the_store(lab: Lab, tmp_path: Path) -> None:
    jobs = together(lab, *CHECK, script("differ.py"), "shape", ranks=(2, 1))
    assert codes(jobs) == [1, 1], texts(jobs)
    # A rank that arrives later detects it.
    first = re.search(r"^phalanx: rank \d .*failed: CollectiveMismatch.*\n(?:  .*\n)+", jobs[0].err, re.MULTILINE)
    assert first, texts(jobs)
    assert "rank 2 called all_reduce(float32 [12], SUM) where rank" in first[0]
    assert "dist.all_reduce(torch.ones(12) if rank == 2 else x)" in first[0]
