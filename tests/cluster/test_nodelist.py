"""Slurm's compressed lists. The expected names are the output of `scontrol show hostnames`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.sources.nodelist import LIMIT, counts, expand

NAMES = [
    ("n1", "n1"),
    ("gpu-a.example.org", "gpu-a.example.org"),
    ("node[1-3,07,10-12]", "node1 node2 node3 node07 node10 node11 node12"),
    ("n[001-003]", "n001 n002 n003"),
    ("n[8-010]", "n8 n9 n10"),
    ("n[098-101]", "n098 n099 n100 n101"),
    ("n[98-101]", "n98 n99 n100 n101"),
    ("n[09-9]", "n09"),
    ("n[0-0]", "n0"),
    ("n[2,1]", "n2 n1"),
    ("n[1-2][3-4]", "n13 n14 n23 n24"),
    ("rack[1-2]n[1-4]", "rack1n1 rack1n2 rack1n3 rack1n4 rack2n1 rack2n2 rack2n3 rack2n4"),
    ("tux[1-2],tux[1-3]-[1-2]", "tux1 tux2 tux1-1 tux1-2 tux2-1 tux2-2 tux3-1 tux3-2"),
    ("a[1-2]-ib,b,c[3]x", "a1-ib a2-ib b c3x"),  # that scontrol refuses a suffix, later versions accept it
    (" n[1-2] ", "n1 n2"),
]


@pytest.mark.parametrize(("text", "names"), NAMES)
def test_names(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


BROKEN = [
    ("", "empty"),
    ("  ", "empty"),
    ("a,,b", "empty"),
    (",a", "empty"),
    ("a,", "empty"),
    ("n[", "brackets"),
    ("n[1", "brackets"),
    ("n1]", "brackets"),
    ("n]1[", "brackets"),
    ("n[[1]]", "brackets"),
    ("n[]", "not a number"),
    ("n[1-]", "not a number"),
    ("n[-1]", "not a number"),
    ("n[1,,2]", "not a number"),
    ("n[a-b]", "not a number"),
    ("n[1 - 2]", "not a number"),
    ("n[1-2-3]", "not a number"),
    ("n[\u0661]", "not a number"),
    ("n[3-1]", "backwards"),
    ("a b", "not a node name"),
    ("a;reboot", "not a node name"),
    ("-oProxyCommand", "dash"),
    ("(null)", "not a node name"),
    (f"n[0-{LIMIT}]", "more than"),
    ("n[0-999999999999999999]", "more than"),
    ("n[1-999]" * 9, "more than"),
    (f"n[1-{LIMIT}],m", "more than"),
]


@pytest.mark.parametrize(("text", "why"), BROKEN)
def test_broken_names(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        expand(text)


def test_as_many_names_as_allowed() -> None:
    assert len(expand(f"n[1-{LIMIT}]")) == LIMIT


@given(st.lists(st.integers(0, 120), min_size=1, max_size=9), st.integers(1, 4), st.sampled_from(["", "-ib", "x7"]))
def test_numbers_come_back_in_order(numbers: list[int], width: int, suffix: str) -> None:
    padded = [f"{number:0{width}d}" for number in numbers]
    assert expand(f"n[{','.join(padded)}]{suffix}") == tuple(f"n{number}{suffix}" for number in padded)


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 5))
def test_a_range_is_its_numbers_one_by_one(first: int, more: int, width: int) -> None:
    low, high = f"{first:0{width}d}", f"{first + more:0{width}d}"
    assert expand(f"n[{low}-{high}]") == tuple(f"n{number:0{width}d}" for number in range(first, first + more + 1))


@given(st.text("n1-[],( )", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (expand, counts):
        try:
            assert read(text)
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("3,1", [3, 1]), ("64(x2)", [64, 64]), ("1(x1)", [1]), ("0,2", [0, 2])],
)
def test_counts(text: str, numbers: list[int]) -> None:
    assert counts(text) == tuple(numbers)


@pytest.mark.parametrize(
    "text",
    ["", "a", "2(x)", "2(3)", "(x3)", "1,,2", "2(x0)", "-1", "2(x3", "1(x65537)", "1(x65536),1", "1(x9999999999)"],
)
def test_broken_counts(text: str) -> None:
    with pytest.raises(ValueError, match="count"):
        counts(text)
