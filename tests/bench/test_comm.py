"""`phalanx bench comm`: how it evaluates times, and one small real run of all parts."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.comm import jobs, traffic
from benchmarks.comm import results as wire
from benchmarks.comm.benchmark import main
from benchmarks.comm.jobs import Job
from benchmarks.comm.ranks import verification
from benchmarks.comm.ranks.backends import TorchBackend
from benchmarks.comm.ranks.operations import Buffers, Call, Task
from benchmarks.comm.ranks.rounds import RoundRunner, RoundSettings
from benchmarks.comm.report import comparison
from benchmarks.comm.report.targets import slower_cases, targets
from benchmarks.comm.results import CommNote, CommResults, DdpSteps, Link, Measurement, WorldInfo, slow_links
from benchmarks.comm.settings import CommSettings
from benchmarks.comm.traffic import KIB, MIB, OPERATIONS
from phalanx.errors import OptionError
from phalanx.launcher.spawn.spawn import spawn
from tests.kit.cli import Result, phalanx

CPU = torch.device("cpu")


def cell(backend: str, *rounds: float, operation: str = "all_reduce", size: int = KIB, ranks: int = 4) -> Measurement:
    place = {"both": "out"}.get(OPERATIONS[operation].place, "in") if operation in OPERATIONS else "out"
    return Measurement(ranks, operation, "float32", place, size, size, backend, rounds, p50=min(rounds, default=0.0))


def world(ranks: int, *nodes: tuple[int, ...], device: str = "cpu") -> WorldInfo:
    where = nodes or (tuple(range(ranks)),)
    return WorldInfo(ranks, where, ("host",) * ranks, (device,) * ranks, ("shm", "gloo"))


# -- bandwidths


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("broadcast", 1),
        ("reduce", 1),
        ("all_gather", 0.75),
        ("reduce_scatter_tensor", 0.75),
        ("all_to_all_single", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("sendrecv", 1),
        ("pingpong", 1),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, factor: float) -> None:
    one = cell("gloo", 0.5, 1.0, 4.0, operation=operation, size=8 * MIB)
    assert one.algorithm == 8 * MIB
    assert one.bus == factor * 8 * MIB


def test_what_memory_must_do() -> None:
    # 4 ranks: data is read and written once, while 4 ranks each copy as much.
    least = {name: traffic.passes(name, 4, "out") for name in OPERATIONS}
    assert least["all_reduce"] == least["all_to_all"] == least["sendrecv"] == 1
    assert least["broadcast"] == 0.5
    assert least["reduce"] == least["all_gather"] == least["reduce_scatter_tensor"] == 5 / 8
    assert least["gather"] == least["scatter"] == least["pingpong"] == 1 / 4
    assert traffic.passes("all_gather_into_tensor", 4, "in") == 1 / 2
    assert traffic.passes("all_reduce", 1, "in") == 0


def test_traffic_over_links() -> None:
    def over(name: str) -> float:
        return traffic.over_links(name, 12.0, ranks=6, nodes=3, local=2)

    assert over("all_reduce") == 16
    assert over("broadcast") == over("sendrecv") == 12
    assert over("all_gather") == over("reduce_scatter") == 8
    assert over("all_to_all") == 16
    assert traffic.over_links("all_reduce", 12.0, 6, 1, 6) == 0


def test_share_of_memory_and_of_the_slowest_link() -> None:
    copy = Measurement(4, traffic.COPY, "float32", "out", KIB, KIB, "cpu", (1.0,))
    near = CommResults(worlds=[world(4)], measurements=[cell("shm", 2.0), copy])
    assert near.share(near.measurements[0]) == 0.5
    assert CommResults(worlds=[world(4)], measurements=near.measurements[:1]).share(near.measurements[0]) is None
    slow, quick = (Link(4, "shm", 0, one, 1e-6, speed, same_node=False) for one, speed in ((2, 512.0), (3, 4096.0)))
    inside = Link(4, "shm", 0, 1, 1e-6, 1.0, same_node=True)  # not a limit for traffic between nodes
    apart = CommResults(
        worlds=[world(4, (0, 1), (2, 3))], measurements=[cell("shm", 8.0), copy], links=[slow, quick, inside]
    )
    assert apart.share(apart.measurements[0]) == 2 * 0.5 * KIB / 512 / 8


def test_on_one_gpu_the_limit_is_its_own_memory() -> None:
    gathered = Measurement(1, "all_gather", "float32", "out", KIB, KIB, "nccl", (4.0,))
    reduced = Measurement(1, "all_reduce", "float32", "in", KIB, KIB, "nccl", (4.0,))
    copy = Measurement(1, traffic.COPY, "float32", "out", KIB, KIB, "cuda", (1.0,))
    results = CommResults(worlds=[world(1, device="H200")], measurements=[gathered, reduced, copy])
    assert results.share(gathered) == 0.25
    assert results.share(reduced) is None  # one rank has nothing to reduce


@pytest.mark.parametrize(("text", "size"), [("64K", 65536), ("25MiB", 25 * MIB), ("1G", 1 << 30), ("100", 100)])
def test_sizes(text: str, size: int) -> None:
    assert traffic.parse_size(text) == size


def test_size_range() -> None:
    assert traffic.size_range(KIB, 256 * MIB, 16) == (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
    assert [traffic.format_size(size) for size in (0, 100, 1536, 25 * MIB)] == ["-", "100 B", "1.5 KiB", "25 MiB"]


# -- results are checked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_wrong_element_is_counted(dtype: str) -> None:
    tensor = torch.zeros(30_001, dtype=getattr(torch, dtype))
    verification.fill_tensor(tensor, verification.total(3, 4))
    assert tensor[:3].tolist() == [sum((3 + index + rank) % 5 for rank in range(4)) for index in range(3)]
    assert verification.count_differences(tensor, verification.total(3, 4)) == 0
    tensor[[0, 20_000, 30_000]] += 1
    assert verification.count_differences(tensor, verification.total(3, 4)) == 3


@pytest.mark.parametrize("operation", [name for name, one in OPERATIONS.items() if one.sized])
def test_what_was_not_done_is_seen(operation: str) -> None:
    """An operation that does nothing must fail the check."""
    for place in {"both": ("in", "out")}.get(OPERATIONS[operation].place, (OPERATIONS[operation].place,)):
        task = Task(operation, "float32", place, KIB)
        wrong = 0
        for rank in range(2):
            buffers = Buffers.allocate(KIB, "float32", CPU, rank, 2).cut(operation, KIB, "float32")
            verification.fill(task, buffers)
            wrong += verification.count_wrong(task, buffers)
        assert wrong > 0


# -- links


def test_the_slow_link_is_named() -> None:
    ends = [(one, other) for one in range(4) for other in range(4) if one != other]
    speeds = {ends_: 8e9 if ends_[0] // 2 == ends_[1] // 2 else 1e9 for ends_ in ends}
    speeds[0, 3] = 0.4e9
    all_links = [
        Link(4, "gloo", *ends_, 1e-5, speed, ends_[0] // 2 == ends_[1] // 2) for ends_, speed in speeds.items()
    ]
    (found,) = slow_links(all_links)  # links between nodes are slower than others, but alike
    assert (found.link.source, found.link.target) == (0, 3)
    hosts = msgspec.structs.replace(world(4, (0, 1), (2, 3)), hosts=("a", "a", "b", "b"))
    assert found.text(hosts) == (
        "gloo, 4 ranks: the link from rank 0 (a) to rank 3 (b) is slow: 0.40 GB/s, "
        "while the median between nodes is 1.00"
    )


# -- compared with other backends


def test_beside_an_earlier_run() -> None:
    before = [cell("shm", 1.0, 1.0, 1.0), cell("gloo", 1.0, 2.0, 3.0), cell("mpi", 1.0)]
    now = [cell("shm", 1.2, 1.2, 1.2), cell("gloo", 1.5, 2.2, 3.0), cell("mpi", 0.5), cell("nccl", 1.0)]
    found = comparison.compare(now, before)
    assert [(one.measurement.backend, round(one.ratio, 2), one.word) for one in found] == [
        ("shm", 1.2, "slower"),
        ("gloo", 1.1, ""),  # its rounds vary by more than that
        ("mpi", 0.5, "faster"),
    ]


def test_an_earlier_run_that_is_none(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "launch"}')
    for path in (other, tmp_path / "nowhere.json"):
        with pytest.raises(OptionError, match="cannot be read"):
            main(["--compare", str(path)], {})


def test_promises() -> None:
    def judged(shm: float, gloo: float, mpi: float, copy: float) -> list[bool | None]:
        large = 25 * MIB
        results = CommResults(
            worlds=[world(2)],
            measurements=[
                cell("shm", shm, ranks=2),
                cell("gloo", gloo, ranks=2),
                cell("mpi", mpi, ranks=2),
                cell("shm", shm, size=large, ranks=2),
                cell("gloo", gloo, size=large, ranks=2),
                cell("mpi", mpi, size=large, ranks=2),
                Measurement(2, traffic.COPY, "float32", "out", large, large, "cpu", (copy,)),
            ],
            steps=[DdpSteps(2, "shm", (shm,)), DdpSteps(2, "gloo", (gloo,))],
        )
        return [target.met for target in targets(results)]

    assert judged(1.0, 10.0, 1.0, 0.7) == [True] * 6
    assert judged(1.0, 9.0, 0.9, 0.6) == [False, False, True, False, False, True]
    assert judged(1.0, 1.4, 2.0, 1.0) == [False, True, False, True, True, False]
    assert targets(CommResults(worlds=[world(2)], measurements=[cell("gloo", 1.0, ranks=2)])) == []


def test_too_close_to_tell() -> None:
    rounds = (0.9, 1.05, 1.05, 1.3)
    results = CommResults(worlds=[world(4)], measurements=[cell("shm", *rounds), cell("mpi", 1.0, 1.0, 1.0, 1.0)])
    assert [target.met for target in targets(results)] == [None, None]
    assert slower_cases(results, "shm", ["mpi"]) == []
    slower = CommResults(measurements=[cell("shm", 2.0, 2.0), cell("mpi", 1.0, 1.0)])
    assert slower_cases(slower, "shm", ["mpi"]) == ["all_reduce 1 KiB, 4 ranks: 2.00 of mpi's time"]


# -- the command


def test_words_travel() -> None:
    for word in (world(4, (0, 1), (2, 3)), cell("shm", 1.0), CommNote(4, "so"), DdpSteps(4, "shm", (1.0,))):
        assert wire.decode("[0] " + wire.encode(word)) == word
    assert wire.decode("something else") is None
    assert wire.decode(wire.PREFIX + '{"type": "cell", "ra') is None


def test_who_starts_the_ranks() -> None:
    wanted = CommSettings(("shm", "gloo"), ("all_reduce",), (KIB,), ("float32",), ("calls",), False, 3, 0.01)
    line = Job(wanted, 2).command()
    assert line[3:8] == ["phalanx", "run", "-g", "2", "--cpu"]
    assert any(word.endswith("benchmarks/scripts/comm.py") for word in line)
    assert "--cpu" not in Job(replace(wanted, backends=("nccl",)), None, ("--hosts", "a,b")).command()
    by_mpi = Job(replace(wanted, backends=("shm", "mpi")), 64).command()
    assert by_mpi[:3] == ["mpirun", "-n", "64"]
    assert "--oversubscribe" in by_mpi
    with pytest.raises(OptionError, match="mpirun"):
        jobs.check(replace(wanted, backends=("mpi",)), ["--hosts", "a,b"])


@pytest.mark.parametrize(
    "argv",
    [
        ["-g", "two"],
        ["--operations", "all_reduced"],
        ["--sizes", "big"],
        ["--sizes", "1K", "-b", "1K"],
        ["-b", "1M", "-e", "1K"],
        ["--dtypes", "float33"],
        ["--rounds", "-1"],
        ["--json", "/nowhere/at/all.json"],
        ["--plot", "comm.foo"],
        ["--backends", "shm,,gloo"],
    ],
)
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


def slow_in_one() -> tuple[int, str]:
    """Measure a call that only one of two ranks finds too slow for many repetitions."""

    class Slow(TorchBackend):
        def call(self, task: Task, b: Buffers) -> Call | None:
            does = super().call(task, b)
            return lambda: (does and does(), time.sleep(0.2 * self.rank))

    rounds = RoundRunner([Slow("gloo", CPU, 10)], RoundSettings(1, 0.001))
    buffers = functools.partial(Buffers.allocate, KIB, "float32", rank=torch.distributed.get_rank(), ranks=2)
    (found,) = rounds.measure(Task("broadcast", "float32", "in", KIB), buffers, ())
    return len(found.rounds), found.failure


def test_ranks_that_find_a_call_differently_slow_do_as_many() -> None:
    assert spawn(slow_in_one, 2, backend="gloo", fresh=False) == [(1, "")] * 2


@functools.cache
def small() -> tuple[Result, dict[str, object], tuple[str, ...]]:
    """Run all operations, backends and parts, with as few rounds as possible."""
    with tempfile.TemporaryDirectory() as folder:
        few = ("-g", "2", "--backends", "shm,gloo,never", "--sizes", "1K,100K", "--rounds", "2", "--seconds", "0.002")
        files = ("--json", f"{folder}/comm.json", "--plot", f"{folder}/comm.png")
        done = phalanx("bench", "comm", *few, *files, "--in-place", timeout=150)
        drawn = tuple(sorted(path.name for path in Path(folder).glob("*.png") if path.stat().st_size > 1000))
        return done, json.loads(Path(folder, "comm.json").read_text()), drawn


@pytest.mark.extended
@pytest.mark.xdist_group("bench comm")
def test_everything_is_measured_and_right() -> None:
    done, data, drawn = small()
    assert drawn == ("comm-links.png", "comm.png")
    found = msgspec.convert(data["measurements"], type=list[Measurement], strict=False)
    measured = {(one.operation, one.place, one.size, one.backend) for one in found if one.rounds}
    for name, operation in OPERATIONS.items():
        places = {"both": ("in", "out")}.get(operation.place, (operation.place,))
        sizes = (KIB, 100 * KIB) if operation.sized else (0,)
        for backend in ("shm", "gloo"):
            expected = {(name, place, size, backend) for place in places for size in sizes}
            assert expected <= measured, done.out + done.err
    assert not any(one.wrong or one.failure for one in found), done.out
    for one in found:
        assert 0 < one.seconds < done.seconds
        assert 0 < one.p50 <= one.p99
    shares = [one["share"] for one in data["measurements"] if one["operation"] == "all_reduce"]  # type: ignore[attr-defined]
    assert all(share > 0 for share in shares)
    assert {(one["source"], one["target"]) for one in data["links"]} == {(0, 1), (1, 0)}  # type: ignore[attr-defined]
    assert {one["backend"] for one in data["steps"] if one["rounds"]} == {"shm", "gloo"}  # type: ignore[attr-defined]


@pytest.mark.extended
@pytest.mark.xdist_group("bench comm")
def test_the_targets_are_printed() -> None:
    done, data, _ = small()
    # So short a run cannot show whether targets are met, only that each was evaluated.
    assert done.code in (0, 1)
    assert len(data["targets"]) == 3  # type: ignore[arg-type]
    assert "2 ranks, cpu" in done.out
    assert "memory, every rank copying at the same time" in done.out
    assert "never is not measured" in done.out
    assert "WRONG" not in done.out


def test_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main(["--backends", "gloo", "-g", "2"], {}) == 1
    assert "exit code 1" in capfd.readouterr().out


def test_nothing_measured_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "run", lambda _, __, hear: hear(world(2)) or "")
    assert main(["--backends", "nccl", "-g", "2"], {}) == 1


def test_wrong_results_make_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def run(_: Job, __: object, hear: functools.partial[None]) -> str:
        for word in (world(2), msgspec.structs.replace(cell("gloo", 1.0, ranks=2), wrong=3)):
            hear(word)
        return ""

    monkeypatch.setattr(Job, "run", run)
    assert main(["--backends", "gloo", "-g", "2"], {}) == 1
    assert "3 wrong elements" in capfd.readouterr().out
