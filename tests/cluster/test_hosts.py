"""--hosts and host files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.sources.hosts import Host, parse_hostfile, parse_hosts

LISTS = [
    ("a", [Host("a")]),
    ("a,b", [Host("a"), Host("b")]),
    ("a:8,b:2", [Host("a", 8), Host("b", 2)]),
    ("a:8,b", [Host("a", 8), Host("b")]),
    (" a:8 , b:2 ", [Host("a", 8), Host("b", 2)]),
    ("b:1", [Host("b", 1)]),
    ("b:1,3", [Host("b", devices="1,3")]),
    ("b:3-3", [Host("b", devices="3-3")]),
    ("a:0-7,b:1,3", [Host("a", devices="0-7"), Host("b", devices="1,3")]),
    ("a:1,3,5-7,b,c:2", [Host("a", devices="1,3,5-7"), Host("b"), Host("c", 2)]),
    ("a:5,0", [Host("a", devices="5,0")]),
    ("user@a:4,b", [Host("user@a", 4), Host("b")]),
    ("[fd00::1]:8,[fd00::2]", [Host("fd00::1", 8), Host("fd00::2")]),
    ("me@[FD00::0001]:0-3", [Host("me@fd00::1", devices="0-3")]),
    ("10.0.0.1:2,10.0.0.2", [Host("10.0.0.1", 2), Host("10.0.0.2")]),
    ("node_1.example.org,node-2:4", [Host("node_1.example.org"), Host("node-2", 4)]),
]


@pytest.mark.parametrize(("text", "hosts"), LISTS)
def test_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == tuple(hosts)


BROKEN_LISTS = [
    ("", "empty"),
    ("a,,b", "empty entry"),
    ("a,", "empty entry"),
    ("3", "is not a host"),
    ("0-7,a", "is not a host"),
    ("a,3", "is not a host"),
    ("a:", "nothing behind its colon"),
    ("a:0", "at least 1 slot.*a:0-0"),
    ("a:0,b:0-0", "at least 1 slot"),
    ("a:-1", "not a number of slots, a device"),
    ("a:x", "“x” is not a number of slots"),
    ("a:1.5", "not a number of slots"),
    ("a:8 b:2", "more than one colon"),
    ("a:999999", "not a number of slots"),
    ("a:٣", "not a number of slots"),
    ("a:3-1", "backwards"),
    ("a:0-3,2", "device 2 of a twice"),
    ("a:1,1", "device 1 of a twice"),
    ("a,b,a", "names a twice"),
    ("a:1,root@A:2", "names a twice"),
    ("[fd00::1],[fd00:0::1]", "names fd00::1 twice"),
    ("fd00::1", "in brackets"),
    ("[fd00::1", "no IPv6 address"),
    ("[a]:2", "no IPv6 address"),
    ("[fe80::1%eth0]", "no IPv6 address"),
    ("[]", "no IPv6 address"),
    ("[fd00::1]8", "behind its address"),
    ("-oProxyCommand=x", "not a host name"),
    ("-a", "not a host name"),
    ("-u@a", "no proper user"),
    ("@a", "no proper user"),
    ("u@-a", "not a host name"),
    ("u@", "not a host name"),
    ("u@v@a", "no proper user"),
    (".a", "not a host name"),
    ("a b", "not a host name"),
    ("a;ls", "not a host name"),
    ("$(ls)", "not a host name"),
    ("ä", "not a host name"),
    ("a\n,b\nc", "not a host name"),
]


@pytest.mark.parametrize(("text", "why"), BROKEN_LISTS)
def test_broken_hosts(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_hosts(text)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True),
            st.one_of(st.none(), st.integers(1, 64), st.sets(st.integers(0, 7), min_size=2)),
        ),
        min_size=1,
        unique_by=lambda row: row[0],
    )
)
def test_written_host_lists_are_parsed(rows: list[tuple[str, int | set[int] | None]]) -> None:
    written, meant = [], []
    for name, given_ in rows:
        if isinstance(given_, set):
            devices = ",".join(map(str, given_))
            written.append(f"{name}:{devices}")
            meant.append(Host(name, devices=devices))
        else:
            written.append(name if given_ is None else f"{name}:{given_}")
            meant.append(Host(name, given_))
    assert parse_hosts(",".join(written)) == tuple(meant)


@given(st.text("ab@:-[]1,. =#\n", max_size=16))
def test_a_name_is_never_an_option_of_ssh(text: str) -> None:
    for parse in (parse_hosts, parse_hostfile):
        try:
            hosts = parse(text)
        except ValueError:
            continue
        assert hosts
        assert not any(part.startswith("-") for host in hosts for part in host.name.split("@"))


FILES = [
    ("node1 slots=4 max_slots=8\nnode2 slots=2 max-slots=2\n", [Host("node1", 4), Host("node2", 2)]),
    ("worker-1 slots=4\nworker-2 slots=4", [Host("worker-1", 4), Host("worker-2", 4)]),
    ("a:4\nb:2\n", [Host("a", 4), Host("b", 2)]),
    ("a\nb\n", [Host("a"), Host("b")]),
    ("# all\n\na slots=2 # the big one\n  b\r\n", [Host("a", 2), Host("b")]),
    ("a slots = 4\nb slots= 2 max_slots =3\n", [Host("a", 4), Host("b", 2)]),
    ("a\tslots=4", [Host("a", 4)]),
    ("a max_slots=4", [Host("a")]),
    ("a slots=2\nb\na slots=3\na:1\n", [Host("a", 6), Host("b")]),
    ("a\na\nb\nc slots=4\n", [Host("a", 2), Host("b", 1), Host("c", 4)]),
    ("me@a:4\n[fd00::1]:2\n[fd00::2] slots=3", [Host("me@a", 4), Host("fd00::1", 2), Host("fd00::2", 3)]),
    ("\ufeffa slots=4\n", [Host("a", 4)]),
]


@pytest.mark.parametrize(("text", "hosts"), FILES)
def test_hostfile(text: str, hosts: list[Host]) -> None:
    assert parse_hostfile(text) == tuple(hosts)


BROKEN_FILES = [
    ("", "names no host"),
    ("# nobody\n\n", "names no host"),
    ("a\n\nb slots=x\n", "^line 3: “x” is not a number of slots for b"),
    ("a slots=0", "^line 1: .*at least 1"),
    ("a slots=", "^line 1: “” is not a number"),
    ("a slots", "^line 1: “slots” is unknown"),
    ("a 4", "^line 1: “4” is unknown"),
    ("a gpus=4", "^line 1: “gpus=4” is unknown"),
    ("a,b", "^line 1: “a,b” is not a host name"),
    ("a:4 slots=4", "^line 1: .*twice"),
    ("a slots=4 slots=4", "^line 1: .*twice"),
    ("a slots=4 max_slots=2", "^line 1: .*more than max_slots=2"),
    ("a:0-7", "^line 1: “0-7” is not a number of slots"),
    ("slots=4", "^line 1: .*is not a host"),
    ("a\n-oProxyCommand=x", "^line 2: “-oProxyCommand=x” is not a host"),
    ("a\n-x", "^line 2: “-x” is not a host name"),
    ("a slots=2\n\na\n", "^line 3: a is listed both with slots and without"),
    ("me@a\nyou@a\n", "^line 2: you@a was me@a before"),
]


@pytest.mark.parametrize(("text", "why"), BROKEN_FILES)
def test_broken_hostfile(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_hostfile(text)
