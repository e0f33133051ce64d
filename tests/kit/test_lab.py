"""Checks the lab itself: otherwise tests that use it would prove nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from functools import partial

import pytest

from tests.kit import state
from tests.kit.cli import PYTHON, alive, start, until
from tests.kit.lab import Lab, Node, Slurm, Sshd, mpirun, needs
from tests.kit.proc import SLOWEST, pid_inside

pytest_plugins = ["pytester"]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def say(node: Node, command: str, **env: str) -> str:
    result = node.run(words=("sh", "-c", command), env=env)
    assert result.code == 0, result.out + result.err
    return result.out.strip()


def reaches(node: Node, address: str) -> bool:
    return node.run(words=("ping", "-q", "-c1", "-W0.4", address)).code == 0


def addresses(node: Node, name: str) -> list[str]:
    return [line.split()[0] for line in say(node, f"getent ahosts {name}").splitlines() if "STREAM" in line]


def test_nodes_reach_each_other_by_name_and_by_both_addresses(lab: Lab) -> None:
    for name in (lab[1].name, lab[1].address, lab[2].address6):
        assert reaches(lab[0], name)


def test_a_node_is_a_separate_machine(lab: Lab, tmp_path: object) -> None:
    assert [say(node, "hostname") for node in lab] == [node.name for node in lab]
    open(f"{lab[0].memory}/mine", "w").close()
    assert [say(node, "ls /dev/shm") for node in lab] == ["mine", "", ""]
    os.unlink(f"{lab[0].memory}/mine")
    assert "node2" not in say(lab[0], "ps ax -o args")
    assert say(lab[0], "ls /sys/class/net").split() == ["eth0", "lo"]
    assert lab[0].run(words=("pwd",), cwd=str(tmp_path)).out.strip() == str(tmp_path)


def test_command_has_the_environment_of_the_test(lab: Lab) -> None:
    ours = os.environ["PHALANX_HOME"], os.environ["TMPDIR"]
    assert tuple(say(lab[0], "echo $PHALANX_HOME $TMPDIR $MORE", MORE="more").split()) == (*ours, "more")
    own = {node.run(words=("printenv", "PHALANX_HOME"), home="own").out.strip() for node in lab}
    assert own == {f"{ours[0]}/{node.name}" for node in lab}


def test_phalanx_runs_on_a_node(lab: Lab) -> None:
    assert lab[0].run("--version").out.startswith("phalanx ")


def test_signal_reaches_the_command_itself(lab: Lab) -> None:
    job = lab[0].start(words=("sh", "-c", "trap 'echo stopped; exit 3' TERM; echo up; while :; do sleep 0.05; done"))
    job.wait_for("up")
    job.signal(signal.SIGTERM)
    assert (job.wait(), job.out) == (3, "up\nstopped\n")


def test_terminal_on_a_node(lab: Lab) -> None:
    job = lab[0].terminal(words=("sh", "-c", "tty -s && hostname; stty size; sleep 60"))
    job.wait_for("24 80")
    job.send(b"\x03")
    assert job.wait() == -signal.SIGINT
    assert job.out.startswith(lab[0].name)


def test_hosts(lab: Lab) -> None:
    node, other = lab[0], lab[1]
    assert addresses(node, node.name) == [node.address]
    node.hosts("bad")
    assert addresses(node, node.name) == ["127.0.1.1"]
    assert addresses(node, other.name) == [other.address]
    node.hosts("none")
    assert node.run(words=("getent", "ahosts", node.name)).code == 2
    node.hosts("10.1.2.3 anything\n")
    assert addresses(node, "anything") == ["10.1.2.3"]
    node.reset()
    assert addresses(node, node.name) == [node.address]


def test_ipv6_only(lab: Lab) -> None:
    for node in lab:
        node.ipv6_only()
    assert addresses(lab[0], lab[1].name) == [lab[1].address6]
    assert reaches(lab[0], lab[1].name)
    assert not reaches(lab[0], lab[1].address)
    lab.reset()
    assert reaches(lab[0], lab[1].address)


def test_lost_network_and_its_return(lab: Lab) -> None:
    one, two = lab[0], lab[1]
    for lose, find in (
        (partial(one.drop, True), partial(one.drop, False)),
        (partial(one.link, False), partial(one.link, True)),
        (partial(one.nic, False), one.reset),
    ):
        lose()
        assert not reaches(two, one.address)
        find()
        for address in (one.address, one.address6):
            until(
                partial(reaches, two, address), 10, f"{address} to answer again"
            )  # the kernel delays links that are up


def test_block_is_of_one_port(lab: Lab) -> None:
    serve = "import socket; s = [socket.create_server(('', p)) for p in (7001, 7002)]; print('up'); s[0].accept()"
    lab[0].start(words=(*PYTHON, "-c", serve)).wait_for("up")
    connect = f"import socket, sys; socket.create_connection(('{lab[0].name}', int(sys.argv[1])), 0.3)"
    lab[0].block(7001, True)
    assert lab[1].run(words=(*PYTHON, "-c", connect, "7002")).code == 0
    assert "timed out" in lab[1].run(words=(*PYTHON, "-c", connect, "7001")).err
    lab[0].block(7001, False)
    assert lab[1].run(words=(*PYTHON, "-c", connect, "7001")).code == 0


def test_delay(lab: Lab) -> None:
    lab[0].delay(20)
    times = re.search(r"= ([\d.]+)/", say(lab[1], f"ping -q -c2 -i0.05 {lab[0].address}"))
    assert times
    assert float(times[1]) > 40
    lab[0].delay(0)
    assert reaches(lab[1], lab[0].address)


def test_second_interface_and_a_setting(lab: Lab) -> None:
    for number, node in enumerate(lab, 1):
        node.add_interface("ib0", f"10.88.0.{number}/24")
    lab[0].sysctl("net.ipv4.tcp_retries2", "5")
    assert reaches(lab[0], "10.88.0.2")
    assert say(lab[0], "cat /proc/sys/net/ipv4/tcp_retries2") == "5"
    lab.reset()
    assert say(lab[0], "ls /sys/class/net").split() == ["eth0", "lo"]
    assert say(lab[0], "cat /proc/sys/net/ipv4/tcp_retries2") == "15"


def test_kill_takes_one_node(lab: Lab) -> None:
    jobs = [node.start(words=("sh", "-c", "setsid sleep 60 & echo up; wait")) for node in lab]
    for job in jobs:
        job.wait_for("up")
    lab[0].kill()
    assert jobs[0].wait() == -signal.SIGKILL
    assert lab[0].processes() == []
    assert alive(jobs[1].pid)
    assert [command for _, command in lab[1].processes() if command.startswith("sleep")] == ["sleep 60"]


@pytest.mark.warmed
def test_every_node_has_a_fork_server_that_tests_share(lab: Lab) -> None:
    lab[0].kill()
    assert lab[0].processes() == []
    for node in lab:
        assert f"pid {pid_inside(node.fork_server)}  idle" in node.run("warm", "--list").out


def test_ssh_is_real_and_configured_as_if_by_the_user(lab: Lab, ssh: Sshd) -> None:
    for target in (lab[1].name, lab[1].address, lab[1].address6):
        result = lab[0].run(words=("ssh", target, "hostname; echo $HOME $TMPDIR"), env=ssh.env)
        assert (result.err, result.out.split()) == ("", [lab[1].name, lab.home, os.environ["TMPDIR"]])


def test_ssh_connection_is_cut(lab: Lab, ssh: Sshd) -> None:
    job = lab[0].start(words=("ssh", lab[1].name, "echo up; sleep 60"), env=ssh.env)
    job.wait_for("up")
    ssh.cut(lab[1])
    assert job.wait() == 255
    left = [pid for pid, command in lab[1].processes() if "sleep 60" in command]
    assert left
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert lab[0].run(words=("ssh", lab[1].name, "true"), env=ssh.env).code == 0


def test_srun(lab: Lab, slurm: Slurm) -> None:
    result = lab[0].run(words=("srun", "-N2", "-n3", "hostname"), env=slurm.env)
    assert result.code == 0, result.err + slurm.log()
    assert len(result.out.split()) == 3
    assert set(result.out.split()) == {lab[0].name, lab[1].name}


def test_mpirun(lab: Lab, ssh: Sshd) -> None:
    script = "echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_RANK $(hostname) $PHALANX_HOME"
    words = (*mpirun(ssh, f"{lab[0].name}:2,{lab[1].name}:1"), "sh", "-c", script)
    result = lab[0].run(words=words, env=ssh.env)
    home = os.environ["PHALANX_HOME"]
    expected = [f"0 0 {lab[0].name} {home}", f"1 1 {lab[0].name} {home}", f"2 0 {lab[1].name} {home}"]
    assert sorted(result.out.splitlines()) == expected
    assert not result.err or re.search(r"Function: +setpgid", result.err), result.err  # Open MPI's own warning, seldom


@pytest.mark.parametrize("turn", ["killed", "back"])
def test_killed_daemons_of_the_lab_are_back_for_the_next_test(lab: Lab, ssh: Sshd, slurm: Slurm, turn: str) -> None:
    last = lab[2].name
    assert lab[0].run(words=("srun", "-w", last, "hostname"), env=slurm.env).out == f"{last}\n"
    assert lab[0].run(words=("ssh", last, "hostname"), env=ssh.env).out == f"{last}\n"
    if turn == "killed":
        lab[2].kill()


LEAKING = """
from tests.kit.cli import until

def test_process(lab):
    lab[1].start(words=("sh", "-c", "setsid sleep 61 & exec sleep 62"))
    job = lab[1].start(words=("sh", "-c", "setsid sleep 63 >/dev/null 2>&1 & echo up"))
    job.wait()

def test_shm(lab):
    lab[0].run(words=("touch", "/dev/shm/left"))

def test_job(lab, slurm):
    lab[0].run(words=("sbatch", "-o", "/dev/null", "--wrap", "exec sleep 64"), env=slurm.env)
    until(lambda: any("sleep 64" in command for _, command in lab[0].processes()), 10, "the job")

def test_tidy(lab, slurm):
    assert [node.shared_memory() for node in lab] == [set()] * 3
    assert slurm.jobs() == []
    job = lab[1].start(words=("sleep", "65"))
"""


def test_what_is_left_on_a_node_fails_the_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest("from tests.kit import leaks\nleaks.GRACE = 0.3")
    pytester.makepyfile(LEAKING)
    # No summary: with CI in the environment it would repeat every line.
    result = pytester.runpytest_subprocess("-p", "tests.kit.plugin", "--tb=short", "--strict-markers", "-rN")
    result.assert_outcomes(passed=4, errors=3)
    text = result.stdout.str()
    lines = re.findall("^(?:E +)?leaked (.*)", text, re.M)
    assert [re.sub(r"process \d+", "process", line) for line in lines if "slurmstepd" not in line] == [
        "process on node2: sleep 63",
        "shared memory /dev/shm/left on node1",
        "slurm job 1 RUNNING wrap",
        "process on node1: sleep 64",
    ], text


def test_nothing_is_left_of_a_lab_whose_maker_was_killed(tmp_path: object) -> None:
    code = (
        "import time; from tests.kit.lab import Lab; lab = Lab(2); lab[0].start(words=('sleep', '60'))\n"
        "print('up', *lab._inits, lab[0].processes()[0].pid); time.sleep(60)"
    )
    env = {"PYTHONPATH": ROOT, "TMPDIR": str(tmp_path)}
    job = start(words=(*PYTHON, "-c", code), env=env)
    pids = [int(word) for word in job.wait_for(re.compile("up (.*)\n"))[0][1].split()]
    assert len(pids) == 4
    job.signal(signal.SIGKILL)
    job.wait()
    # Processes that the creator had started are our children now, and a node ends only when they are reaped.
    until(lambda: state.family() is not None and not any(map(alive, pids)), 5, "its nodes to end")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        with Lab(1) as lab:
            assert os.listdir(str(tmp_path)) == [os.path.basename(lab.folder)]
    assert os.listdir(str(tmp_path)) == []


def test_lab_is_up_and_down_in_no_time() -> None:
    began = time.monotonic()
    with Lab(3) as lab:
        inits = [node.init for node in lab]
    assert time.monotonic() - began < 2 * SLOWEST
    assert not any(map(alive, inits))


def test_missing_package_fails_and_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.PROGRAMS, "some-package", ("no-such-program",))
    with pytest.raises(AssertionError, match=r"needs the packages some-package\n  fix: run .ci/packages as root"):
        Lab(1)
