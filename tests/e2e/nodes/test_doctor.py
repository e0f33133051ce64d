"""The doctor on three real hosts: over ssh, in Slurm, with real faults."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import phalanx as package
from tests.kit.cli import PHALANX, Result, run, until
from tests.kit.lab import Lab, Slurm, Sshd
from tests.kit.lab.sshd import PORT

HOSTS = ("--hosts", "node1,node2,node3")
NAMES = ["node1", "node2", "node3"]
OTHER_TORCH = "1.13.1"


def parsed(result: Result, code: int) -> dict[str, Any]:
    assert result.code == code, result.out + result.err
    found: dict[str, Any] = json.loads(result.out)
    assert found["level"] == ("red" if code else found["level"])
    return found


def of(found: dict[str, Any], level: str) -> list[dict[str, str]]:
    return [finding for finding in found["findings"] if finding["level"] == level]


def doctor(lab: Lab, ssh: Sshd, *args: str, code: int = 0) -> dict[str, Any]:
    return parsed(lab[0].run("doctor", "--json", *(args or HOSTS), env=ssh.env), code)


def close(lab: Lab, node: int) -> None:
    """Set up a firewall that accepts ssh only."""
    rules = ("iif lo accept", "ct state established accept", f"tcp dport {PORT} accept", "drop")
    chain = "\n".join(("type filter hook input priority 0;", *rules))
    lab[node].tool("nft", "-f", "-", text=f"table inet closed {{\nchain input {{\n{chain}\n}}\n}}\n")


def open_(lab: Lab, node: int) -> None:
    lab[node].tool("nft", "delete", "table", "inet", "closed")


# -- over ssh


def test_healthy_hosts(lab: Lab, ssh: Sshd) -> None:
    found = doctor(lab, ssh)
    assert found["nodes"] == NAMES
    # caused by a loaded machine
    assert [finding for finding in of(found, "yellow") if finding["check"] != "links"] == []
    facts = {finding["check"]: finding["fact"] for finding in found["findings"] if not finding["node"]}
    assert facts["versions"] == "the same on all nodes"
    assert facts["names"] == "every node finds every other by its name"
    assert facts["reach"] == "each reaches every other on a free port"
    assert facts["clock"].startswith("clocks are within")
    assert [(pair["one"], pair["other"]) for pair in found["pairs"]] == list(itertools.combinations(NAMES, 2))
    assert all(min(pair["latency"], pair["there"], pair["back"]) > 0 for pair in found["pairs"])
    assert [(one["ranks"], one["right"]) for one in found["collectives"]] == [(3, True)] * 2
    assert facts["all_reduce"].startswith("gloo, 3 ranks: 16 MiB in ")
    for name in NAMES:
        assert {"disk", "limits", "shared memory"} <= {one["check"] for one in found["findings"] if one["node"] == name}


def test_names_that_lead_to_loopback_are_yellow_and_fit_the_screen(lab: Lab, ssh: Sshd) -> None:
    for node in lab:
        node.hosts("bad")
    job = lab[0].terminal("doctor", *HOSTS, env=ssh.env, size=(24, 80))
    assert job.wait() == 0, job.both
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", job.both).splitlines()]
    for name in NAMES:
        start = f"yellow  names on {name}: this machine's name {name} resolves to"
        assert any(line.startswith(start) for line in lines)
    assert any(line.startswith("green   all_reduce    gloo, 3 ranks: 16 MiB in") for line in lines), lines
    assert max(map(len, lines)) <= 80
    # Long text continues on the next line, with the same indent.
    cause = next(place for place, line in enumerate(lines) if line.startswith("          cause: /etc/hosts says so"))
    assert re.match(r" {17}\S", lines[cause + 1])
    table = next(place for place, line in enumerate(lines) if line.split() == ["from", "\\", "to", *NAMES])
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == NAMES


def test_a_slow_node_is_named(lab: Lab, ssh: Sshd) -> None:
    shape = ("rate", "300mbit", "burst", "256kb", "latency", "100ms")
    lab[2].tool("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
    try:
        found = doctor(lab, ssh)
    finally:
        lab[2].tool("tc", "qdisc", "del", "dev", "eth0", "root")
    (slow,) = [finding for finding in of(found, "yellow") if finding["node"]]
    assert slow["check"] == "links"
    assert slow["node"] == "node3"
    assert re.match(r"all links of node3 are slow: 3\d MB/s, the others have ", slow["fact"])


def test_a_firewall_is_red_and_names_who_cannot_reach_whom(lab: Lab, ssh: Sshd) -> None:
    close(lab, 1)
    try:
        found = doctor(lab, ssh, code=1)
    finally:
        open_(lab, 1)
    reds = of(found, "red")
    assert {finding["check"] for finding in reds} == {"reach"}
    assert [finding["fact"] for finding in reds] == [
        f"{node} cannot reach node2 (10.77.0.2: no answer; fd77::2: no answer)" for node in ("node1", "node3")
    ]
    assert all("firewall" in finding["cause"] for finding in reds)
    yellows = {finding["check"]: finding for finding in of(found, "yellow")}
    assert yellows["firewall"]["node"] == "node2"
    assert "nothing was measured" in yellows["links"]["fact"]


def test_a_first_node_that_cannot_be_reached(lab: Lab, ssh: Sshd) -> None:
    close(lab, 0)
    try:
        found = doctor(lab, ssh, *HOSTS, "--join-timeout", "4", code=1)
    finally:
        open_(lab, 0)
    (red,) = of(found, "red")
    assert red["check"] == "start"
    # Either may report first: node 0, which waits, or one that cannot reach it.
    assert re.search(r"node 1 \(node2\), node 2 \(node3\) of 3 have not joined|could not be reached", red["fact"])
    assert "a firewall drop" in red["cause"] + red["fix"]
    assert "firewall" in {finding["check"] for finding in of(found, "yellow")}  # problems here may be the cause


def test_hosts_that_cannot_take_part_are_named_and_the_others_checked(lab: Lab, ssh: Sshd, tmp_path: Path) -> None:
    other = interpreter(tmp_path, torch=OTHER_TORCH)
    env = {**ssh.env, "PHALANX_REMOTE_PYTHON": other}
    found = parsed(lab[0].run("doctor", "--json", "--hosts", "node1,node3,node9", env=env), 1)
    reds = {finding["node"]: finding for finding in of(found, "red")}
    assert reds.keys() == {"node3", "node9"}
    assert "its versions differ" in reds["node3"]["fact"]
    assert OTHER_TORCH in reds["node3"]["cause"]
    assert reds["node9"]["fact"] == "ssh cannot connect"
    assert "Could not resolve hostname node9" in reds["node9"]["cause"]
    assert "ssh node9 true" in reds["node9"]["fix"]
    assert found["nodes"] == ["node1"]
    assert "limits" in {finding["check"] for finding in of(found, "green")}


def test_ctrl_c_leaves_nothing(lab: Lab, ssh: Sshd) -> None:
    job = lab[0].terminal("doctor", *HOSTS, env=ssh.env)
    # The fork server and its rank: the test is running.
    until(lambda: all(len(surveys(lab, node)) > 1 for node in (1, 2)), 30, "the test on the other hosts")
    job.send(b"\x03")
    assert job.wait() == 130, job.both
    assert not any(surveys(lab, node) for node in range(3))
    assert os.listdir(os.environ["TMPDIR"]) == []


def surveys(lab: Lab, node: int) -> list[str]:
    return [one.command for one in lab[node].processes() if "phalanx.doctor.survey" in one.command]


# -- without torch


def interpreter(folder: Path, torch: str = "") -> str:
    """Create a Python that has everything except torch, or another version of it."""
    done = run((sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")))
    assert done.code == 0, done.err
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"torch|functorch|.*\.pth$", path.name):
            (packages / path.name).symlink_to(path)
    (packages / "phalanx.pth").write_text(f"{Path(package.__file__).parent.parent}\n")
    if torch:
        (packages / f"torch-{torch}.dist-info").mkdir()
    return str(folder / "venv" / "bin" / "python")


@pytest.mark.parametrize("hosts", [(), HOSTS])
def test_a_python_without_torch_is_red(lab: Lab, ssh: Sshd, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    python = interpreter(tmp_path)
    result = lab[0].run(words=(python, "-m", "phalanx", "doctor", "--json", *hosts), env=ssh.env)
    reds = of(parsed(result, 1), "red")
    assert any(finding["fact"] == f"torch is not installed for {python}" for finding in reds), reds
    assert "Traceback" not in result.out + result.err


# -- in Slurm


def test_an_allocation_is_checked_as_a_whole(lab: Lab, slurm: Slurm) -> None:
    result = lab[0].run(words=("salloc", "-N2", *PHALANX, "doctor", "--json"), env=slurm.env)
    found = parsed(result, 0)
    assert found["nodes"] == NAMES[:2]
    assert [(pair["one"], pair["other"]) for pair in found["pairs"]] == [("node1", "node2")]
    assert found["collectives"][0]["ranks"] == 2


def test_tasks_of_a_step_give_one_report(lab: Lab, slurm: Slurm) -> None:
    result = lab[0].run(words=("srun", "-N2", "-n3", *PHALANX, "doctor", "--json"), env=slurm.env)
    found = parsed(result, 0)
    assert found["nodes"] == ["node1 (rank 0)", "node1 (rank 1)", "node2"]
    assert {finding["node"] for finding in found["findings"]} >= {"node1", "node2"}
    assert found["collectives"][0]["ranks"] == 3
