"""The order of measurements, which links are slow, and how the result is shown."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.commands.debug import doctor
from phalanx.cluster import links
from phalanx.doctor import pairs, report, result
from phalanx.doctor.finding import Finding
from phalanx.doctor.pairs import Collective, HostPair
from phalanx.doctor.result import Result


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 10, 31])
def test_every_pair_meets_once_and_no_node_is_in_two_pairs(count: int) -> None:
    plan = pairs.rounds(count)
    assert sorted(itertools.chain(*plan)) == list(itertools.combinations(range(count), 2))
    for at_once in plan:
        assert max(Counter(itertools.chain(*at_once)).values()) == 1
    if count > 8:
        assert len(plan) <= count
    else:
        assert all(len(at_once) == 1 for at_once in plan)


def mesh(nodes: str, **slow: float) -> list[HostPair]:
    """Return links between all pairs with 1 GB/s, except those given, such as ab=0.1."""
    return [
        HostPair(one, other, 1e-4, 1e9 * (rate := slow.get(one + other, 1.0)), 1e9 * rate)
        for one, other in itertools.combinations(nodes, 2)
    ]


@pytest.mark.parametrize(
    ("links", "level", "words"),
    [
        (mesh("ab"), "green", "1 pair: 100 µs, 1 GB/s"),
        (mesh("abc", ab=0.5), "green", "3 pairs: 100 µs, 500 MB/s to 1 GB/s"),
        (mesh("abcd", bd=0.2), "yellow", "b – d: 200 MB/s, the others have 1 GB/s"),
        (mesh("abc", ac=0.05, bc=0.05), "yellow", "all links of c are slow: 50 MB/s, the others have 1 GB/s"),
        (mesh("abcd", ad=0.1, bd=0.1, cd=0.1), "yellow", "all links of d are slow: 100 MB/s"),
        ([HostPair("a", "b", 1e-4, 1e9, 1e8)], "yellow", "b to a: 100 MB/s, but 1 GB/s the other way"),
        ([HostPair("a", "b", 1e-4, 1e7, 1e7)], "yellow", "the network carries 10 MB/s"),
        ([HostPair("a", "b", 2e-2, 1e9, 1e9)], "yellow", "a message takes 20 ms"),
        ([*mesh("abc")[:2], HostPair("b", "c", 5e-3, 1e9, 1e9)], "yellow", "b – c: 5 ms, the others have 100 µs"),
        ([*mesh("abc")[:2], HostPair("b", "c", 5e-4, 1e9, 1e9)], "green", "100 µs to 500 µs"),
        ([HostPair("a", "b", 1e-4, 1e7, 1e6, local=True)], "green", "on one machine"),
    ],
)
def test_links(links: list[HostPair], level: str, words: str) -> None:
    (finding,) = pairs.judge(links)
    assert (finding.level, words in finding.fact) == (level, True), finding


def test_without_links_there_are_no_findings() -> None:
    assert pairs.judge([]) == []
    assert pairs.judge_collectives([]) == []


def test_all_reduce() -> None:
    good = Collective("all_reduce", "gloo", 4, 16 << 20, 0.1)
    assert good.bus == pytest.approx(1.5 * (16 << 20) / 0.1)
    (finding,) = pairs.judge_collectives([good])
    assert (finding.level, finding.fact) == ("green", "gloo, 4 ranks: 16 MiB in 100 ms, 252 MB/s a link")
    (finding,) = pairs.judge_collectives([good, replace(good, right=False)])
    assert (finding.level, "wrong sum" in finding.fact) == ("red", True)


FOUND = Result(
    nodes=("a", "b", "c"),
    machines=(
        Finding("disk", "green", "fine", node="a"),
        Finding("disk", "green", "fine", node="b"),
        Finding("disk", "red", "full [bold]of[/bold] [/] it", "logs", "rm [x]", node="c"),
        Finding("names", "green", "one", node="a"),
        Finding("names", "green", "two", node="b"),
    ),
    between=(Finding("clock", "yellow", "off", "x", "y", node="b"),),
    pairs=tuple(mesh("abc", bc=0.5)),
    collectives=(Collective("all_reduce", "gloo", 3, 4, 1e-3),),
)


def test_result_survives_the_file_and_the_screen() -> None:
    assert result.decode(result.encode(FOUND)) == FOUND
    line = b"[rank0]: " + result.MARK.encode() + result.encode(FOUND)
    assert result.find(b"before\n" + line + b"\nafter") == FOUND
    assert result.find(b"nothing\n" + result.MARK.encode() + b"{broken") is None


def test_what_was_measured_between_hosts_is_kept_for_runs_that_show_it(tmp_path: Path) -> None:
    near = replace(FOUND.pairs[0], local=True)
    doctor._keep(replace(FOUND, pairs=(near, *FOUND.pairs[1:])), {"PHALANX_HOME": str(tmp_path)})
    found = links.known(str(tmp_path), {"b", "c"})
    assert found is not None
    assert [(link.one, link.other, link.back) for link in found[1]] == [("b", "c", FOUND.pairs[2].back)]
    assert links.known(str(tmp_path), {"a", "b"}) is None  # both are the same machine, without a network between them


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(FOUND)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "red     disk on c: full [bold]of[/bold] [/] it",
        "          cause: logs",
        "          fix:   rm [x]",
        "yellow  clock on b: off",
        "          cause: x",
    ]
    assert [" ".join(line.split()) for line in lines[6:8]] == ["green disk fine", "green names a: one; b: two"]
    assert "b 100 µs, 1 GB/s · 100 µs, 500 MB/s" in [" ".join(line.split()) for line in lines]
    assert lines[-1] == "1 red, 1 yellow, 4 green"


def test_report_as_json() -> None:
    document = report.as_json(FOUND)
    assert document["level"] == "red"
    assert [finding["level"] for finding in document["findings"]] == ["red", "yellow"] + ["green"] * 4
    assert document["pairs"][0]["one"] == "a"
    assert document["collectives"][0]["bus"] > 0


def test_many_nodes_show_their_slowest_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = "abcdefghij"
    report.show(Result(tuple(nodes), pairs=tuple(mesh(nodes, ch=0.6))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["slowest", "pairs", "latency", "there", "back"]
    assert lines[2].startswith("c – h")
    assert len(lines) == 14
