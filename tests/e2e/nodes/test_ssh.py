"""Every node from one terminal, over the real ssh: hosts are namespaces, and sshd runs in each."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.cli.options import parse_run
from phalanx.launcher.remote import node_spec
from phalanx.launcher.remote.node_spec import NodeRefused, NodeSpec
from tests.e2e.places import READY, SCRIPTS, pids, script
from tests.kit import proc
from tests.kit.cli import phalanx, until
from tests.kit.lab import Lab, Sshd

HERE, THERE = "node1:2,node2:1", "node2:2,node3:1"  # node 0 is where the command is typed, or is not
HARD = ("a b", 'it\'s "$(touch bad)" `id`', "two\nlines", "--hosts", "")
SECRET = "c0ffee" + "00" * 29

REPORT = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
number = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(number)
seen = {
    "sum": number.item(), "args": sys.argv[1:], "host": os.uname().nodename, "debug": os.environ.get("NCCL_DEBUG"),
    "token": os.environ.get("PHALANX_TOKEN"), "run": os.environ["TORCHELASTIC_RUN_ID"], "stdin": sys.stdin.read(),
}
print(json.dumps(seen), flush=True)
dist.barrier()
while not os.path.exists("go"):
    pass
"""


def command_lines() -> dict[str, str]:
    """Return the command lines of all processes that are not ranks, by name."""
    found = {}
    for process in proc.every():
        words = proc.command(process.pid)
        if "report.py" not in words or "ssh" in words.partition(" ")[0]:
            found[f"{process.pid} {words[:40]}"] = words
    return found


@pytest.mark.parametrize("how", ["here, --hostfile", "there, --hosts"])
def test_ranks_of_all_hosts_are_one_world(lab: Lab, ssh: Sshd, tmp_path: Path, how: str) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    Path(lab.home, ".bashrc").write_text("echo Welcome; printf 'no line'\n")
    where = ("--hostfile", "hosts") if "here" in how else ("--hosts", THERE)
    job = lab[0].start(
        *("run", "--cpu", *where, "report.py", *HARD),
        cwd=str(tmp_path),
        env={**ssh.env, "NCCL_DEBUG": "WARN", "PHALANX_TOKEN": SECRET},
        input="typed",
    )
    seen = [json.loads(match[1]) for match in job.wait_for(re.compile(r'\] (\{"sum.*\})'), 3)]
    lines = command_lines()
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.both
    assert {rank["sum"] for rank in seen} == {6.0}
    assert all(rank["args"] == list(HARD) for rank in seen)
    assert not (tmp_path / "bad").exists()
    assert {rank["debug"] for rank in seen} == {"WARN"}
    assert {rank["token"] for rank in seen} == {None}
    assert len({rank["run"] for rank in seen}) == 1
    hosts = ["node1", "node1", "node2"] if "here" in how else ["node2", "node2", "node3"]
    assert sorted(rank["host"] for rank in seen) == hosts
    assert [rank["stdin"] for rank in seen if rank["stdin"]] == (["typed"] if "here" in how else [])
    assert any("ssh " in line and " -T " in line for line in lines.values())
    for line in lines.values():
        assert not re.search(r"\b[0-9a-f]{64}\b", line), line
        assert "touch bad" not in line
    assert "Welcome" not in job.both


def test_a_rank_that_fails_names_its_host_and_gives_its_code(lab: Lab, ssh: Sshd) -> None:
    boom = "import os, sys; sys.exit(7 if os.environ['RANK'] == '2' else 0)"
    result = lab[0].run("run", "--cpu", "--hosts", THERE, "--no-python", "python3", "-c", boom, env=ssh.env)
    assert result.code == 7, result.err
    assert "node3" in result.err


# -- hosts that cannot take part


def test_every_host_that_fails_is_named_with_its_own_reason(lab: Lab, ssh: Sshd, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "x.py").write_text("")
    hidden = {1: tmp_path, 2: folder / "src"}
    for node, path in hidden.items():
        assert lab[node].run(words=("mount", "-t", "tmpfs", "none", str(path))).code == 0
    try:
        hosts = f"node1:1,node2:1,node3:1,node9:1,unknown@{lab[1].address}:1"
        result = lab[0].run("run", "--cpu", "--hosts", hosts, "src/x.py", cwd=str(folder), env=ssh.env)
    finally:
        for node, path in hidden.items():
            lab[node].run(words=("umount", str(path)))
    assert result.code == 1
    assert "4 of 5 hosts cannot take part" in result.err
    assert "node2: the current folder does not exist there" in result.err
    assert str(folder) in result.err
    assert "node3: the script src/x.py is not there" in result.err
    assert "node9: ssh cannot connect" in result.err
    assert "Could not resolve hostname node9" in result.err
    assert "Permission denied" in result.err
    assert f"ssh-copy-id unknown@{lab[1].address}" in result.err


@pytest.mark.parametrize(
    ("python", "what"),
    [("/no/python", "node3: no such Python"), ("/usr/bin/python3", "node3: phalanx is not installed there")],
)
def test_a_python_that_is_not_there(lab: Lab, ssh: Sshd, tmp_path: Path, python: str, what: str) -> None:
    (tmp_path / "x.py").write_text("")
    result = lab[0].run(
        *("run", "--cpu", "--hosts", "node3:1,localhost:1", "x.py"),
        cwd=str(tmp_path),
        env={**ssh.env, "PHALANX_REMOTE_PYTHON": python},
    )
    assert result.code == 1
    assert what in result.err


def test_a_host_that_is_an_option_is_no_host() -> None:
    result = phalanx("run", "--hosts=-oProxyCommand=touch bad,b", "x.py")
    assert result.code == 2
    assert "is not a host name" in result.err
    assert not os.path.exists("bad")


def test_node_is_not_for_people() -> None:
    assert "node " not in phalanx("--help").out.replace("nodes", "")
    result = phalanx("node", "now")
    assert result.code == 2
    assert "phalanx run --hosts" in result.err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"digest": "0" * 64}, "the script x.py differs there"),
        ({"versions": {"torch": "1.13.1"}}, "its versions differ"),
        ({"options": {}}, "it cannot read the node spec"),
        ({"devices": ("77",)}, "77"),
    ],
)
def test_a_node_says_what_is_wrong_with_it(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    (tmp_path / "x.py").write_text("")
    options = parse_run(["--env", "A=b", "x.py"], {})
    if devices := change.pop("devices", None):
        options = replace(options, workers=replace(options.workers, devices=devices))
    fields: dict[str, Any] = {
        "node": 1,
        "nodes": 2,
        "token": "00" * 32,
        "options": msgspec.to_builtins(options, str_keys=True),
        "digest": "",
        "versions": {},
        "env": {},
        "home": "",
        "names": (),
        "promised": (),
        "host": None,
        "port": 0,
    }
    line = node_spec.encode(NodeSpec(**{**fields, **change})).decode()
    result = phalanx("node", input=line, cwd=str(tmp_path))
    marked = [line for line in result.out.splitlines() if line.startswith(node_spec.MARK.decode())]
    assert len(marked) == 1, result.out + result.err
    refused = node_spec.from_node(marked[0].removeprefix(node_spec.MARK.decode()).encode())
    assert isinstance(refused, NodeRefused), refused
    assert what in refused.what
    assert refused.fix
    assert result.code == 1
    assert not result.err


@pytest.mark.parametrize("text", ["", "half an order", "no order\n"])
def test_a_node_that_receives_nothing_ends(text: str) -> None:
    assert phalanx("node", input=text).code == 1


# -- how it ends


def sleepers(lab: Lab, ssh: Sshd, hosts: str, *, terminal: bool = False):
    make = lab[0].terminal if terminal else lab[0].start
    job = make("run", "--cpu", "--hosts", hosts, "sleepy.py", env=ssh.env, cwd=str(SCRIPTS))
    pids(job, READY, 3)
    return job


@pytest.mark.parametrize("hosts", [HERE, THERE])
def test_ctrl_c_ends_every_host(lab: Lab, ssh: Sshd, hosts: str) -> None:
    job = sleepers(lab, ssh, hosts, terminal=True)
    begin = time.monotonic()
    job.send(b"\x03")
    assert job.wait() == 130
    assert time.monotonic() - begin < 25  # the grace is 30 s
    assert not ranks(lab)


@pytest.mark.parametrize("hosts", [HERE, THERE])
def test_a_killed_starter_ends_every_host(lab: Lab, ssh: Sshd, hosts: str) -> None:
    job = sleepers(lab, ssh, hosts)
    job.signal(signal.SIGKILL)
    job.wait()
    until(lambda: not ranks(lab), 10, "the end of all ranks")


@pytest.mark.parametrize("hosts", [HERE, THERE])
def test_a_cut_connection_ends_the_run_and_names_the_host(lab: Lab, ssh: Sshd, hosts: str) -> None:
    job = sleepers(lab, ssh, hosts)
    node = lab[1] if hosts == HERE else lab[2]
    ssh.cut(node)
    assert job.wait() == 1, job.both
    assert re.search(rf"node 1 \({node.name}\): the ssh connection that started this node has ended", job.err)
    until(lambda: not ranks(lab), 10, "the end of all ranks")  # also of the host that was cut off


def test_a_cut_connection_to_node_0_ends_the_run(lab: Lab, ssh: Sshd) -> None:
    job = sleepers(lab, ssh, THERE)
    ssh.cut(lab[1])
    assert job.wait() == 255, job.both
    assert "ssh node2 has ended with 255" in job.err
    until(lambda: not ranks(lab), 10, "the end of all ranks")  # also of the host that was cut off


def ranks(lab: Lab) -> list[str]:
    return [inside.command for node in lab for inside in node.processes() if "sleepy.py" in inside.command]


def test_usr1_at_the_starter_reaches_the_ranks_of_all_hosts(lab: Lab, ssh: Sshd) -> None:
    job = lab[0].start("run", "--cpu", "--fresh", "--hosts", THERE, script("grace.py"), env=ssh.env)
    job.wait_for("ready", 3)
    job.signal(signal.SIGUSR1)
    job.wait_for(re.compile(r"rank \d got SIGUSR1"), 3)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143, job.both
    assert len(re.findall(r"rank \d saved", job.both)) == 3
