"""Which ranks are slower than the others, and by how much."""

from __future__ import annotations

import pytest

from phalanx.diagnose.rules.stragglers import Total, stragglers, table


def total(number: int, data: int = 10, compute: int = 100, waiting: int = 40, **more: object) -> Total:
    samples = {"data": data, "forward": compute // 2, "backward": compute - compute // 2, "collective": waiting}
    return Total(rank=number, samples=samples, **{"steps": 100, "seconds": 15.0, **more})  # type: ignore[arg-type]


def run(size: int = 8, **culprit: object) -> list[Total]:
    """Return totals on nodes with two GPUs each. The arguments describe rank 5."""
    ranks = [total(number, host="ab"[number >= 4], gpu=number % 2) for number in range(size)]
    ranks[5] = total(5, host="b", gpu=1, **culprit)  # type: ignore[arg-type]
    return ranks


def test_slow_gpu() -> None:
    [found] = stragglers(run(compute=180, waiting=0, seconds=19.0, throttled="thermal"))
    assert found.text == "rank 5 (node b, GPU 1) is 1.8 times slower in compute than the median: thermal throttling"


def test_slow_data() -> None:
    [found] = stragglers(run(data=50, waiting=0))
    assert (found.rank, found.what) == (5, "data")
    assert "slower in data loading" in found.text


@pytest.mark.parametrize(
    "totals",
    [
        [],
        [total(0)],
        run(),
        run(compute=125, waiting=15),
        run(data=13, waiting=37),
        run(data=1, compute=18, waiting=0, seconds=1.9),
        [Total(rank=number, samples={}) for number in range(4)],
    ],
    ids=[
        "nobody",
        "alone",
        "even",
        "a little slower",
        "a third more of next to nothing",
        "too few samples",
        "no samples",
    ],
)
def test_equal_ranks_have_no_stragglers(totals: list[Total]) -> None:
    assert stragglers(totals) == []


def test_slower_of_two() -> None:
    assert [each.rank for each in stragglers([total(0), total(1, compute=140, waiting=0)])] == [1]


def test_without_steps_parts_of_the_time_are_compared() -> None:
    totals = [total(number, steps=0) for number in range(3)] + [total(3, data=75, compute=75, waiting=0, steps=0)]
    assert [(each.rank, each.what) for each in stragglers(totals)] == [(3, "data")]
    assert "50%" in table(totals)[4]


def test_table() -> None:
    lines = table(run(compute=180, waiting=0, seconds=19.0))
    assert lines[0].split() == ["rank", "node", "gpu", "steps", "data", "compute", "waiting"]
    assert lines[1].split() == ["0", "a", "0", "100", "10.0", "ms", "100.0", "ms", "40.0", "ms"]
    assert lines[6].split() == ["5", "b", "1", "100", "10.0", "ms", "180.0", "ms", "0.0", "ms", "1.8x"]
    assert max(map(len, lines)) <= 80
    assert table([]) == []


def test_table_of_many_shows_the_slow_one() -> None:
    totals = run(size=1000, compute=180, waiting=0, seconds=19.0)
    lines = table(totals)
    assert len(lines) == 18
    assert any(line.split()[0] == "5" for line in lines)
    assert lines[-1].split() == ["and", "984", "more", "ranks"]
