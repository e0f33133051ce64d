"""What facts mean: tables, with no machine behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx.cluster import xids as kernel_xids
from phalanx.cluster.xids import XidLine
from phalanx.doctor.checks import (
    clock,
    disk,
    firewall,
    gpus,
    limits,
    names,
    network,
    ports,
    reach,
    shared_memory,
    versions,
)
from phalanx.doctor.checks.clock import Offset
from phalanx.doctor.checks.disk import Disk
from phalanx.doctor.checks.firewall import Firewall
from phalanx.doctor.checks.limits import Limits
from phalanx.doctor.checks.names import NameLookup, Names
from phalanx.doctor.checks.network import Network, NetworkInterface
from phalanx.doctor.checks.ports import Ports
from phalanx.doctor.checks.reach import Reach
from phalanx.doctor.checks.shared_memory import SharedMemory
from phalanx.doctor.checks.versions import Versions
from phalanx.doctor.finding import Finding, worst
from phalanx.doctor.gpu_facts import GpuFacts, GpuMemory, GpuPower, GpuProcess, Gpus

MIB = 1 << 20
GIB = 1 << 30


def told(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{finding.level}: {finding.node}: {finding.fact}: {finding.cause}" for finding in findings)


def expect(findings: Sequence[Finding], level: str, *words: str) -> None:
    assert worst(findings) == level, told(findings)
    for word in words:
        assert word in told(findings), told(findings)
    for finding in findings:
        assert finding.level == "green" or finding.fix, f"nothing to type for: {finding}"
    assert "green" not in {finding.level for finding in findings} or worst(findings) == "green", told(findings)


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Names("a", ("10.0.0.1",), (("10.0.0.1", "a"),)), "green", ["a resolves to 10.0.0.1 (a)"]),
        (Names("a", ("10.0.0.1",)), "green", ["no name"]),
        (Names("a", ("127.0.1.1", "10.0.0.1")), "green", []),
        (Names("a", ("127.0.1.1",)), "yellow", ["resolves to loopback (127.0.1.1)", "phalanx works around it"]),
        (Names("a", ("::1",)), "yellow", ["resolves to loopback (::1)"]),
        (Names("a", trouble="Name or service not known"), "yellow", ["does not resolve: Name or service not known"]),
        (Names("a", ("10.0.0.1",), seconds=5.0), "yellow", ["took 5.0 s"]),
        (Names("a", seconds=10.0, answered=False), "yellow", ["was not resolved within 10 s"]),
    ],
)
def test_own_name(facts: Names, level: str, words: list[str]) -> None:
    expect(names.judge(facts), level, *words)


@pytest.mark.parametrize(
    ("seen", "level", "words"),
    [
        (Names("b", ("10.0.0.2",), (("10.0.0.2", "b.example"),)), "green", ["every node finds"]),
        (Names("b", ("10.0.0.9",)), "yellow", ["resolves to 10.0.0.9, but b has 10.0.0.2"]),
        (Names("b", ("127.0.1.1",)), "yellow", ["which is a itself"]),
        (Names("b", ("10.0.0.1",)), "yellow", ["which is a itself"]),
        (Names("b", trouble="No such host"), "yellow", ["does not resolve: No such host"]),
        (Names("b", answered=False, seconds=10), "yellow", ["within 10 s"]),
        (Names("b", ("10.0.0.2",), (("10.0.0.2", "a"),)), "yellow", ["resolves back to the name of another node, a"]),
    ],
)
def test_names_of_others(seen: Names, level: str, words: list[str]) -> None:
    found = names.compare([NameLookup("a", "b", seen)], {"a": ["10.0.0.1"], "b": ["10.0.0.2"]})
    expect(found, level, *words)


LO = NetworkInterface("lo", True, 65536, ("127.0.0.1",), loopback=True)
ETH = NetworkInterface("eth0", True, 1500, ("10.0.0.1",))


@pytest.mark.parametrize(
    ("ways", "level", "words"),
    [
        ([LO, ETH], "green", ["eth0 10.0.0.1 (mtu 1500); no default route"]),
        ([LO], "yellow", ["no interface but loopback"]),
        ([LO, replace(ETH, up=False)], "yellow", ["no interface but loopback"]),
        ([LO, replace(ETH, inner=True)], "yellow", ["no interface but loopback"]),
        ([replace(LO, up=False), ETH], "red", ["loopback interface is down"]),
        ([LO, replace(ETH, addresses=("fd00::1",))], "yellow", ["IPv6 addresses only: fd00::1"]),
        ([LO, replace(ETH, mtu=576)], "yellow", ["at most 576 bytes"]),
        ([LO, replace(ETH, carrier=False)], "yellow", ["but no link"]),
    ],
)
def test_network(ways: list[NetworkInterface], level: str, words: list[str]) -> None:
    expect(network.judge(Network(tuple(ways))), level, *words)


def test_addresses_come_in_the_order_of_their_use() -> None:
    ib = NetworkInterface("aaa0", True, 4096, ("10.9.0.1",))
    both = replace(ETH, addresses=("fd00::1", "10.0.0.1"))
    docker = NetworkInterface("docker0", True, 1500, ("172.17.0.1",), inner=True)
    assert Network((LO, ib, docker, both), ("eth0",)).addresses == ("10.0.0.1", "10.9.0.1", "fd00::1")


def test_default_routes_of_the_kernels_tables() -> None:
    ipv4 = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n"
    )
    zero = "0" * 32
    ipv6 = (
        f"{zero} 00 {zero} 00 fd000000000000000000000000000001 00000400 00000002 00000000 00000003     eth2\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
    )
    assert network.default_routes(ipv4, ipv6) == ("eth0", "eth2")
    assert network.default_routes("", "") == ()


def test_packets_of_different_sizes() -> None:
    jumbo = replace(ETH, mtu=9000, addresses=("10.0.0.2",))
    far = replace(ETH, mtu=9000, addresses=("10.7.0.2",))
    expect(
        network.compare({"a": Network((LO, ETH)), "b": Network((LO, jumbo))}), "yellow", "1500: a eth0; 9000: b eth0"
    )
    assert network.compare({"a": Network((LO, ETH)), "b": Network((LO, far))}) == []


FINE = Limits(files=4096, files_hard=None, locked=None, tasks=None)


@pytest.mark.parametrize(
    ("facts", "ranks", "level", "words"),
    [
        (FINE, 0, "green", ["4096 open files, any amount of locked memory"]),
        (replace(FINE, locked=8 * MIB), 8, "green", ["8 MiB of locked"]),
        (replace(FINE, files=1024), 8, "green", []),
        (replace(FINE, files=512), 0, "yellow", ["512 files; 1024 are needed", "limit of this shell"]),
        (replace(FINE, files=512, files_hard=512), 0, "yellow", ["hard limit of this login is 512"]),
        (replace(FINE, files=1024), 128, "red", ["1024 files; 2112 are needed for 128 ranks"]),
        (replace(FINE, files=32), 0, "red", ["may open 32 files"]),
        (replace(FINE, tasks=100), 0, "yellow", ["100 processes"]),
        (replace(FINE, group_tasks=100), 0, "yellow", ["100 more processes", "pids.max"]),
        (replace(FINE, group_tasks=3), 0, "red", ["3 more processes"]),
        (replace(FINE, locked=8 * MIB, rdma=("mlx5_0",)), 0, "yellow", ["lock 8 MiB", "mlx5_0"]),
        (replace(FINE, rdma=("mlx5_0",)), 0, "green", []),
    ],
)
def test_limits(facts: Limits, ranks: int, level: str, words: list[str]) -> None:
    expect(limits.judge(facts, ranks=ranks), level, *words)


@pytest.mark.parametrize(
    ("facts", "level", "brief_level"),
    [
        (SharedMemory(8 * GIB, 8 * GIB), "green", "green"),
        (SharedMemory(64 * MIB, 64 * MIB), "yellow", "green"),
        (SharedMemory(32 * MIB, 32 * MIB), "yellow", "yellow"),
        (SharedMemory(8 * GIB, 4 * MIB), "yellow", "yellow"),
        (SharedMemory(8 * GIB, 0), "red", "red"),
        (SharedMemory(trouble="No such file or directory"), "red", "red"),
    ],
)
def test_shared_memory(facts: SharedMemory, level: str, brief_level: str) -> None:
    expect(shared_memory.judge(facts), level, "/dev/shm")
    assert worst(shared_memory.judge(facts, brief=True)) == brief_level


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Disk("/a/b", "/a", total=GIB, free=GIB, inodes=9, free_inodes=9), "green", ["/a/b (in /a): 1 GiB free"]),
        (Disk("/a", "/a", total=GIB, free=GIB), "green", ["/a: 1 GiB free of 1 GiB"]),
        (Disk("/a", "/a", total=GIB, free=50 * MIB), "yellow", ["almost full: 50 MiB free of 1 GiB"]),
        (Disk("/a", "/a", total=GIB, free=0, trouble="No space left on device"), "red", ["is full: 0 B free"]),
        (Disk("/a", "/a", "Read-only file system", GIB, GIB), "red", ["cannot be written: Read-only file system"]),
        (Disk("/a", "/a", "Permission denied"), "red", ["cannot be written: Permission denied"]),
        (Disk("/a", "/a", "", GIB, GIB, 10000, 50), "yellow", ["only 50 free inodes of 10000"]),
        (Disk("/a", "/a", "No space left on device", GIB, GIB, 10000, 0), "red", ["has no free inodes"]),
    ],
)
def test_disk(facts: Disk, level: str, words: list[str]) -> None:
    expect(disk.judge(facts), level, *words)


@pytest.mark.parametrize(
    ("offsets", "level", "words"),
    [
        ({"a": Offset(0, 0), "b": Offset(0.002, 0.001)}, "green", ["within 2 ms"]),
        ({"a": Offset(0, 0), "b": Offset(2.0, 1.5)}, "green", []),  # not certain: the answer took too long
        ({"a": Offset(0, 0), "b": Offset(2.0, 0.1)}, "yellow", ["b: the clock is 2 s ahead of"]),
        ({"a": Offset(0, 0), "b": Offset(-2.0, 0.1), "c": Offset(-2.1, 0.1)}, "yellow", ["a: the clock is 2 s ahead"]),
        ({"a": Offset(0, 0), "b": Offset(0, 0), "c": Offset(-900, 0.1)}, "red", ["c: the clock is 900 s behind"]),
    ],
)
def test_clock(offsets: dict[str, Offset], level: str, words: list[str]) -> None:
    expect(clock.judge(offsets), level, *words)
    assert clock.judge(dict(list(offsets.items())[:1])) == []


def test_the_quickest_answer_tells_the_time() -> None:
    # Ours says 100 when theirs says 90: we are 10 ahead.
    assert clock.best([(100, 95, 110), (100.0, 90.5, 101.0)]) == Offset(10.0, 0.5)
    assert clock.best([]) is None


TORCH = Versions("3.11.7", "0.1.0", "2.13.0+cu130", "13.0", packages=(("torch", "2.13.0+cu130"),))


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (TORCH, "green", ["phalanx 0.1.0, Python 3.11.7, torch 2.13.0+cu130, CUDA 13.0"]),
        (replace(TORCH, packages=(("nvidia-nccl-cu13", "2.28.9"),)), "green", ["NCCL 2.28.9"]),
        (replace(TORCH, packages=(("torch", "2.13.0"),)), "green", []),
        (replace(TORCH, torch=""), "red", ["torch is not installed"]),
        (
            replace(TORCH, packages=(("torch", "2.12.0"),)),
            "yellow",
            ["2.13.0+cu130 would be imported, but pip knows 2.12"],
        ),
        (replace(TORCH, packages=(("torch", "2.12.0"), ("torch", "2.13.0"))), "yellow", ["torch is installed 2 times"]),
        (
            replace(TORCH, packages=(("nvidia-nccl-cu12", "2.27"), ("nvidia-nccl-cu13", "2.28"))),
            "yellow",
            ["NCCL is installed 2 times: nvidia-nccl-cu12 2.27 and nvidia-nccl-cu13 2.28"],
        ),
        (replace(TORCH, cuda="", gpus=4), "yellow", ["4 NVIDIA GPUs", "built for the CPU"]),
        (replace(TORCH, gpus=4), "green", []),
    ],
)
def test_versions(facts: Versions, level: str, words: list[str]) -> None:
    expect(versions.judge(facts), level, *words)


def test_versions_of_nodes() -> None:
    expect(versions.compare({"a": TORCH, "b": TORCH}), "green")
    other = replace(TORCH, torch="2.12.0")
    expect(versions.compare({"a": TORCH, "b": other, "c": TORCH}), "red", "of torch (2.12.0: b; 2.13.0+cu130: a, c)")
    expect(versions.compare({"a": TORCH, "b": replace(TORCH, python="3.11.9")}), "green")
    expect(versions.compare({"a": TORCH, "b": replace(TORCH, python="3.12.1")}), "yellow", "3.11: a; 3.12: b")
    assert versions.compare({"a": TORCH}) == []


def test_version_file_is_read_not_run() -> None:
    text = (
        "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = '12.8'\nhip = None\nx = 1/0\n"
    )
    assert versions.assignments(text) == {"__version__": "2.13.0+cpu", "cuda": "12.8"}


GPU = GpuFacts(0, "H200", "", True, GpuPower(700, 700), GpuMemory(GIB, errors_now=0, errors_ever=0))
BUS = "0000:3b:00.0"
GOOD = Gpus((GPU,), (BUS,), driver="580.1", driver_cuda="13.0", torch_cuda="13.0")


def with_gpu(**changes: object) -> Gpus:
    return replace(GOOD, gpus=(replace(GPU, **changes),))  # type: ignore[arg-type]


def with_memory(**changes: object) -> Gpus:
    return with_gpu(memory=replace(GPU.memory, **changes))  # type: ignore[arg-type]


def with_power(**changes: object) -> Gpus:
    return with_gpu(power=replace(GPU.power, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Gpus(), "green", ["none"]),
        (GOOD, "green", ["1 H200; driver 580.1 (CUDA 13.0)"]),
        (replace(GOOD, topology="all pairs by NVLink", hidden=1), "green", ["1 hidden", "all pairs by NVLink"]),
        (
            replace(GOOD, gone=("x",), confined=True),
            "green",
            ["1 more on the PCI bus are not available"],
        ),
        (replace(GOOD, bus=(BUS, "x"), gone=("x",)), "yellow", ["the PCI bus has 2 GPUs, the driver lists 1"]),
        (replace(GOOD, bus=(BUS, "x"), gone=("x",), silent=("x",)), "red", ["no answer from 1 GPU", "fell off"]),
        (Gpus(bus=(BUS,)), "yellow", ["1 GPU on the PCI bus, and no NVIDIA driver"]),
        (Gpus(bus=(BUS,), silent=(BUS,)), "red", ["no answer from 1 GPU"]),
        (Gpus(bus=(BUS,), trouble="the NVIDIA driver does not answer: x"), "red", ["does not answer: x"]),
        (replace(GOOD, torch_cuda="14.1"), "red", ["built for CUDA 14.1", "13.0 at most"]),
        (replace(GOOD, driver_cuda="13.0", torch_cuda="13.2"), "green", []),
        (with_memory(errors_now=1), "red", ["GPU 0 had 1 memory error that"]),
        (with_memory(errors_ever=3), "yellow", ["3 memory errors", "in its life"]),
        (with_memory(errors_now=None, errors_ever=None), "green", []),
        (with_memory(pending=True), "yellow", ["waits for a reset"]),
        (with_memory(remap_failed=True), "red", ["could not replace"]),
        (with_gpu(persistence=False), "yellow", ["persistence mode is off for GPU 0"]),
        (with_gpu(persistence=None), "green", []),
        (with_power(limit=400), "yellow", ["GPU 0 may draw 400 W, less than 700 W"]),
        (with_power(slowed=("it is too hot", "it is too hot"), temperature=91), "yellow", ["at 91 °C: it is too hot"]),
        (with_gpu(processes=(GpuProcess(7, GIB, "eve", "python x"),)), "yellow", ["process 7 (eve, python x, 1 GiB)"]),
        (with_memory(used=3 * GIB), "yellow", ["3 GiB of GPU 0", "cannot be seen"]),
        (with_memory(used=GIB // 2), "green", []),
        (
            replace(GOOD, xids=(XidLine(79, "0000:3b:00", 60, ""),)),
            "red",
            ["Xid 79", "1 time, the last 1 min ago", "fell off"],
        ),
        (
            replace(GOOD, xids=(XidLine(48, "b", 9e5, ""), XidLine(48, "b", 8e4, ""))),
            "yellow",
            ["2 times, the last 22 h ago"],
        ),
        (replace(GOOD, xids=(XidLine(31, "b", 60, ""),)), "green", []),  # a program's own fault
    ],
)
def test_gpus(facts: Gpus, level: str, words: list[str]) -> None:
    expect(gpus.judge(facts), level, *words)


def test_gpu_with_fewer_links_than_others() -> None:
    good, bad = replace(GPU, links=18), replace(GPU, index=1, links=17, links_down=1)
    expect(gpus.judge(replace(GOOD, gpus=(good, bad))), "yellow", "GPU 1 has 17 NVLinks up, others have 18")
    alone = replace(GPU, links_down=18)  # a card of its own, with nothing to be linked to
    expect(gpus.judge(replace(GOOD, gpus=(alone, replace(alone, index=1)))), "green")


def test_xids_in_the_kernels_log() -> None:
    lines = [
        "6,1,1000000,-;Linux version 6\n",
        "4,2,40000000,-;NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', GPU has fallen off the bus.\n SUBSYSTEM=x\n",
        "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception",
    ]
    assert [(xid.number, xid.bus, xid.age) for xid in kernel_xids.find_xids(lines, 100.0)] == [
        (79, "0000:3b:00", 60.0),
        (13, "0000:3b:00", 0.0),
    ]


NFT = """table inet filter {
	set x {
		type ipv4_addr
	}

	chain input {
		type filter hook input priority filter; policy %s;
		iif "lo" accept
		%s
	}

	chain forward {
		type filter hook forward priority filter; policy drop;
	}
}
table ip nat {
	chain post {
		type nat hook postrouting priority srcnat; policy accept;
	}
}
"""


@pytest.mark.parametrize(
    ("policy", "last", "found"),
    [
        ("accept", "tcp dport 22 accept", []),
        ("drop", "tcp dport 22 accept", ["nft inet filter input"]),
        ("accept", "reject with icmpx type admin-prohibited", ["nft inet filter input"]),
        ("accept", "counter packets 0 bytes 0 drop", ["nft inet filter input"]),
        ("accept", "ip saddr 10.0.0.9 drop", []),
    ],
)
def test_nft_chains(policy: str, last: str, found: list[str]) -> None:
    assert firewall.nft_chains(NFT % (policy, last)) == found


def test_iptables_chains() -> None:
    assert firewall.iptables_chains("-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n") == ["iptables INPUT"]
    assert firewall.iptables_chains("-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with x\n") == ["iptables INPUT"]
    assert firewall.iptables_chains("-P INPUT ACCEPT\n-A INPUT -s 10.0.0.9/32 -j DROP\n") == []
    assert firewall.iptables_chains("") == []


def test_firewall() -> None:
    expect(firewall.judge(Firewall(True, ("nft inet filter input",))), "yellow", "nft inet filter input")
    expect(firewall.judge(Firewall(True)), "green")
    expect(firewall.judge(Firewall(False)), "green", "only root can read")


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Ports(), "green", ["29500 is free; 32768 to 60999"]),
        (Ports(free=False, holder="process 7 (python, of eve)"), "yellow", ["in use by process 7 (python, of eve)"]),
        (Ports(free=False), "yellow", ["29500 is in use: "]),
        (Ports(first=40000, last=40099), "yellow", ["100 ports for connections"]),
        (Ports(first=1024, last=65535), "yellow", ["is in the range of ephemeral ports"]),
        (Ports(first=1024, last=65535, reserved=True), "green", []),
    ],
)
def test_ports(facts: Ports, level: str, words: list[str]) -> None:
    expect(ports.judge(facts), level, *words)


def test_reach() -> None:
    good = Reach("a", "b", "10.0.0.2")
    bad = Reach("a", "b", "10.0.0.2", "no answer")
    other = Reach("a", "b", "fd00::2")
    expect(reach.judge([good]), "green")
    expect(reach.judge([bad]), "red", "a: a cannot reach b (10.0.0.2: no answer)", "a firewall drops")
    expect(
        reach.judge([bad, other]), "yellow", "a reaches b at fd00::2, but not at every address (10.0.0.2: no answer)"
    )
    expect(reach.judge([other, bad]), "green")  # only the first choice matters
    expect(reach.judge([replace(bad, trouble="Connection refused")]), "red", "10.0.0.2: Connection refused")
    assert reach.judge([]) == []
