"""All nodes join before anything starts: a node that cannot gets the reason and the fix, there and at node 0."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import PLAIN, codes, texts, together
from tests.e2e.places import script
from tests.kit.cli import PYTHON, Env
from tests.kit.handle import Handle
from tests.kit.lab import Lab, Node
from tests.kit.lab.node import Home

PORT = 29500
HELLO = re.compile(r"hello \d of \d")


def call(
    node: Node,
    place: int,
    *options: str,
    script: str = script("hello.py"),
    nodes: int = 2,
    ranks: str = "1",
    master: str = "node1",
    patience: int = 120,
    home: Home = "shared",
    env: Env | None = None,
) -> Handle:
    """Start one node of a run whose ranks only print a line."""
    words = ("-n", str(nodes), "-g", ranks, "-i", str(place), "--master", master, "--join-timeout", str(patience))
    return node.start("run", *PLAIN, *words, *options, script, home=home, env=env)


def refused(leader: Handle, member: Handle, *, at_member: str, at_leader: str) -> None:
    """Check that the member ends with its reason at once, and that node 0 prints the rejection and waits until
    Ctrl-C.
    """
    assert member.wait() == 1
    leader.wait_for("was rejected: ")
    leader.signal(signal.SIGINT)
    assert leader.wait() == 130
    jobs = texts([leader, member])
    assert re.search(at_member, member.err), jobs
    assert re.search(r"was rejected: .*" + at_leader, leader.err), jobs
    assert "  fix: " in member.err, jobs
    assert not HELLO.search(leader.both + member.both), jobs


# -- the leader cannot be reached


def test_why_the_leader_was_not_reached(lab: Lab) -> None:
    """All at the same time, with a leader or something else behind each port, because each must wait for its
    timeout.
    """
    one, two, _ = lab
    two.hosts(f"127.0.0.1 localhost\n{one.address} node1 leader\n127.0.1.1 node2 itself\n")
    one.block(7003, True)
    other = one.start(words=(*PYTHON, "-m", "http.server", "7004"))
    other.wait_for("Serving")
    silent = "import signal, socket; s = socket.create_server(('', 7005)); print('up'); signal.pause()"
    one.start(words=(*PYTHON, "-c", silent)).wait_for("up")
    leader = call(one, 0, master="node1:7003", patience=3)
    members = {
        "name": call(two, 1, master="nowhere", patience=3),
        "loopback": call(two, 1, master="itself", patience=3),
        "refused": call(two, 1, master="leader:7002", patience=3),
        "no route": call(two, 1, master="10.99.0.1", patience=3),
        "filtered": call(two, 1, master="leader:7003", patience=3),
        "foreign": call(two, 1, master="leader:7004", patience=3),
        "silent": call(two, 1, master="leader:7005", patience=3),
    }
    at_member = {
        "name": (
            r'could not be reached in \d s: the name "nowhere" of the leader does not resolve here\n'
            r"  the name service says: .*\n"
            r"  fix: use an address of node 0: --master ADDRESS, or add the name to /etc/hosts"
        ),
        "loopback": (
            r'the name "itself" of the leader resolves to this machine itself, and no leader runs on it\n'
            r"  itself is 127\.0\.1\.1 here; .*\n"
            r"  /etc/hosts:3: 127\.0\.1\.1 node2 itself\n(.*\n)*"
            r"  fix: use an address of node 0 that other machines reach: --master ADDRESS, "
            r"or give itself its real address in /etc/hosts"
        ),
        "refused": (
            r"leader \(10\.77\.0\.1\) is up, but nothing listens on its port 7002\n"
            r"  10\.77\.0\.1 port 7002: the connection was refused\n"
            r"  fix: start node 0, or give its port: --master-port PORT"
        ),
        "no route": (
            r"this machine has no route to 10\.99\.0\.1\n"
            r"  10\.99\.0\.1 port 29500: Network is unreachable, no route from this machine\n"
            r"  fix: use an address of node 0 in a network that this machine is in: --master ADDRESS"
        ),
        "filtered": (
            r"leader \(10\.77\.0\.1\) does not answer on port 7003\n"
            r"  10\.77\.0\.1 port 7003: no answer in 3 s, tried from 10\.77\.0\.2 \(eth0\)\n"
            r"  fix: a firewall drops it, or the machine is down: let TCP port 7003 through to node 0"
        ),
        "foreign": (
            r"what listens on leader \(10\.77\.0\.1\) port 7004 is not phalanx\n"
            r'  10\.77\.0\.1 port 7004: answered "HTTP/1\.0 404 .*\n'
            r"  fix: choose another port for all nodes: --master-port PORT"
        ),
        "silent": r"leader \(10\.77\.0\.1\) accepted the connection on port 7005, but did not answer\n(.*\n)*  fix:",
    }
    for name, job in members.items():
        assert job.wait() == 1, name
        assert re.search(at_member[name], job.err), f"{name}:\n{job.err}"
        assert "Traceback" not in job.err, f"{name}:\n{job.err}"
    assert leader.wait() == 1
    assert re.search(
        r"node 1 of 2 has not joined in 3 s\n"
        r"  joined: node 0 \(node1\)\n"
        r"  listening on 10\.77\.0\.1:7003\n"
        r"  no connection attempts: .*firewall.*\n"
        r"  fix: start the same command with -i 1 there; --join-timeout waits longer",
        leader.err,
    ), leader.err


def test_a_port_that_something_else_holds_is_reported_at_node_0_with_its_holder(lab: Lab) -> None:
    lab[0].start(words=(*PYTHON, "-m", "http.server", str(PORT))).wait_for("Serving")
    leader = call(lab[0], 0)
    assert leader.wait() == 2
    assert f"port {PORT} on 10.77.0.1 is in use" in leader.err
    assert "http.server" in leader.err
    assert "a free port is taken" not in leader.err  # not with several nodes: the others could not know it


def test_a_leader_that_comes_later_is_found(lab: Lab) -> None:
    members = [call(lab[place], place, nodes=3) for place in (1, 2)]
    # They print what they wait for, after a short delay.
    for job in members:
        job.wait_for("waiting for the leader: node1 (10.77.0.1) is up, but nothing listens on its port 29500")
    leader = call(lab[0], 0, nodes=3)
    assert codes([leader, *members]) == [0, 0, 0]
    assert sorted(HELLO.findall(leader.out)) == [f"hello {rank} of 3" for rank in range(3)]


# -- the leader rejects the node


def test_another_token(lab: Lab) -> None:
    leader, member = call(lab[0], 0, home="own"), call(lab[1], 1, home="own")
    refused(
        leader,
        member,
        at_member=r"node 0 \(node1:29500\) does not know this node's token",
        at_leader="a different token",
    )
    mine = re.search(r"this node's token: (?:from )?(\S+/node2/token) \(fingerprint ([0-9a-f]{8})\)", member.err)
    theirs = re.search(r"node 0's token: .*fingerprint ([0-9a-f]{8})", member.err)
    assert mine
    assert theirs
    assert "PHALANX_TOKEN" in member.err
    # Node 0 shows the same for comparison, and what to type.
    assert theirs[1] != mine[2]
    assert theirs[1] in leader.err
    assert "PHALANX_TOKEN" in leader.err
    # The token itself is never printed.
    for job in (leader, member):
        assert not re.search("[0-9a-f]{64}", job.both)


def test_a_token_from_the_environment_is_enough_and_no_worker_sees_it(lab: Lab, tmp_path: Path) -> None:
    secret = "ab" * 32
    look = tmp_path / "look.py"
    look.write_text(f"import os\nprint('hello 0 of 2', {secret!r} in ' '.join(os.environ.values()))\n")
    env = {"PHALANX_TOKEN": secret}
    jobs = [call(lab[place], place, script=str(look), home="own", env=env) for place in (0, 1)]
    assert codes(jobs) == [0, 0], texts(jobs)
    assert jobs[0].out.count("hello 0 of 2 False") == 2


def test_open_on_both_works_with_a_warning(lab: Lab) -> None:
    jobs = together(lab, *PLAIN, "--no-auth", script("hello.py"))
    assert codes(jobs) == [0, 0], texts(jobs)
    assert "--no-auth: there is no token, so anyone who reaches the port can join" in jobs[0].err


@pytest.mark.parametrize("opener", [0, 1], ids=["node 0", "node 1"])
def test_open_on_one_side_only_is_refused(lab: Lab, opener: int) -> None:
    jobs = [call(lab[place], place, *(("--no-auth",) if place == opener else ())) for place in (0, 1)]
    refused(*jobs, at_member="does not know this node's token", at_leader="a different token")
    assert "--no-auth" in jobs[1].err, jobs[1].err


def test_another_run(lab: Lab) -> None:
    leader, member = call(lab[0], 0, "--rdzv-id", "green"), call(lab[1], 1, "--rdzv-id", "red")
    at_member = r"leads another run\n  this node: red\n  node 0 .*: green\n  fix: give the same --rdzv-id on every node"
    refused(leader, member, at_member=at_member, at_leader="it belongs to the run red, this is green")


def test_another_number_of_nodes_or_ranks(lab: Lab) -> None:
    at_member = r"would not start what node 0 .* starts\n  this node: {}\n  node 0 .*: {}\n  fix: type the same command"
    leader, member = call(lab[0], 0), call(lab[1], 1, nodes=3)
    refused(
        leader,
        member,
        at_member=at_member.format("nodes: 3", "nodes: 2"),
        at_leader="it has nodes: 3, node 0 has nodes: 2",
    )
    leader, member = call(lab[0], 0, ranks="2,1"), call(lab[1], 1, ranks="2,2")
    refused(
        leader,
        member,
        at_member=at_member.format("workers: 2,2", "workers: 2,1"),
        at_leader="it has workers: 2,2, node 0 has",
    )


def test_another_script(lab: Lab, tmp_path: Path) -> None:
    """A script with the same name differs; the same script at another path does not."""
    for name, text in (("one", "print('hello 0 of 2')"), ("two", "print('bye')"), ("three", "print('hello 0 of 2')")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
    one, two, three = (str(tmp_path / name / "train.py") for name in ("one", "two", "three"))
    leader, member = call(lab[0], 0, script=one), call(lab[1], 1, script=two)
    digests = r"this node: script: train\.py sha256 (\w+)\n  node 0 .*: script: train\.py sha256 (?!\1)\w+\n"
    refused(leader, member, at_member=digests, at_leader=r"it has script: train\.py sha256")
    assert "keep the same script there" in member.err
    jobs = [call(lab[0], 0, script=one), call(lab[1], 1, script=three)]
    assert codes(jobs) == [0, 0], texts(jobs)


def _with_torch(folder: Path, version: str) -> dict[str, str]:
    """Return an environment in which this version of torch is found before the real one."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


def test_another_major_version_is_refused(lab: Lab, tmp_path: Path) -> None:
    leader, member = call(lab[0], 0), call(lab[1], 1, env=_with_torch(tmp_path, "3.0.0"))
    at_member = (
        r"has other versions than node 0 .*\n  this node: torch 3\.0\.0\n  node 0 .*: torch 2\..*\n  fix: install"
    )
    refused(leader, member, at_member=at_member, at_leader=r"it has torch 3\.0\.0, node 0 has torch 2\.")


def test_another_minor_version_and_other_arguments_are_only_noted(lab: Lab, tmp_path: Path) -> None:
    env = _with_torch(tmp_path, "2.99.0")
    same = ("-n", "2", "-g", "1", "--master", "node1", script("hello.py"))
    jobs = [
        lab[0].start("run", *PLAIN, "-i", "0", *same, "--lr", "1"),
        lab[1].start("run", *PLAIN, "-i", "1", *same, "--lr", "2", env=env),
    ]
    assert codes(jobs) == [0, 0], texts(jobs)
    for job in jobs:
        assert re.search(r"node2 has torch 2\.99\.0, node1 2\.", job.err), texts(jobs)
        assert "node2 was started with other arguments than node1" in job.err, texts(jobs)


def test_a_number_that_is_taken(lab: Lab) -> None:
    leader, first = call(lab[0], 0, nodes=3), call(lab[1], 1, nodes=3)
    first.wait_for("joined node1 at 10.77.0.1 as node 1")
    second = call(lab[2], 1, nodes=3)
    at_member = (
        r"node 1 of this run is already there: node2, pid \d+\n(.*\n)*  fix: give every node its own --node-rank"
    )
    refused(leader, second, at_member=at_member, at_leader=r"node 1 is taken by node2, pid \d+")
    assert "node3 at 10.77.0.3 was rejected" in leader.err
    assert first.wait() == 130  # by the Ctrl-C at node 0


def test_a_node_without_the_devices_it_was_to_use_is_reported_at_node_0_too(lab: Lab) -> None:
    leader = call(lab[0], 0)
    leader.wait_for("meeting at")
    words = ("-n", "2", "-i", "1", "--master", "node1", "--devices", "0", script("hello.py"))
    member = lab[1].start("run", "--fresh", *words)
    assert member.wait() == 2
    assert "--devices 0 cannot be had" in member.err
    leader.wait_for(re.compile("node2.*: --devices 0 cannot be had"))
    leader.signal(signal.SIGINT)
    assert leader.wait() == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "2", "-i", "1"), "2 nodes, but the address of node 0 is missing"),
        (("-n", "2", "-g", "2,1", "--master", "node1"), "-g 2,1 differs per node, and the index of this node"),
        (("-n", "2", "-i", "2", "--master", "node1"), "-i 2 is beyond the last node"),
    ],
)
def test_usage(lab: Lab, words: tuple[str, ...], message: str) -> None:
    result = lab[1].run("run", *PLAIN, *words, script("hello.py"))
    assert result.code == 2
    assert message in result.err
    assert "  fix: phalanx run" in result.err


# -- while it lasts


def test_a_member_that_dies_before_the_start_may_come_again(lab: Lab) -> None:
    leader, member = call(lab[0], 0, nodes=3), call(lab[1], 1, nodes=3)
    member.wait_for("as node 1")
    member.signal(signal.SIGKILL)
    leader.wait_for("node 1 (node2) left before the start")
    jobs = [leader, call(lab[1], 1, nodes=3), call(lab[2], 2, nodes=3)]
    assert codes(jobs) == [0, 0, 0], texts(jobs)


def test_waiting_is_one_line_that_is_painted_again(lab: Lab) -> None:
    words = ("-n", "3", "-g", "1", "--master", "node1", "--join-timeout", "30", script("hello.py"))
    leader = lab[0].terminal("run", *PLAIN, "-i", "0", *words, size=(24, 200))
    leader.wait_for(re.compile(r"1 of 3 nodes joined, waiting for nodes 1, 2 \(\d s\)"))
    member = lab[1].terminal("run", *PLAIN, "-i", "1", *words)
    leader.wait_for("2 of 3 nodes joined, waiting for node 2 (")
    assert leader.wait() == 1
    assert member.wait() == 1
    waiting, at_member = leader.out.split("meeting at", 1)[1].split("phalanx: node 2 of 3 has not joined in 30 s\r\n")
    assert waiting.count("nodes joined") >= 3
    assert waiting.count("\n") == 1, waiting  # that of the announcement: nothing was left standing
    assert re.search(r"nodes joined, waiting for nodes 1, 2 \(\d+ s\)\r\x1b\[J", waiting), waiting
    assert "joined: node 0 (node1), node 1 (node2)" in at_member
    # Members that have joined also get the reason for the end.
    assert "node 2 of 3 has not joined in 30 s" in member.out


def test_waiting_without_a_terminal_is_a_line_after_some_seconds(lab: Lab) -> None:
    leader = call(lab[0], 0)
    leader.wait_for(re.compile(r"1 of 2 nodes joined, waiting for node 1 \(\d+ s\)\n"))
    assert leader.err.count("nodes joined") == 1
    member = call(lab[1], 1)
    assert codes([leader, member]) == [0, 0]
