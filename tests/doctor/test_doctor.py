"""The doctor on this machine: real checks, real ranks, real faults."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.doctor import machine, result, torch_build
from phalanx.doctor.checks import clock, disk, limits, names, ports, reach
from phalanx.doctor.checks.reach import Echo
from phalanx.doctor.finding import LEVELS
from phalanx.doctor.preflight import preflight
from tests.kit.cli import PHALANX, descendants, phalanx, python, run, start, until

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
CHECKS = {"versions", "gpus", "names", "network", "ports", "firewall", "limits", "shared memory", "disk"}


def doctor(*args: str) -> tuple[int, dict[str, Any]]:
    done = phalanx("doctor", "--json", *args, timeout=120)
    assert done.code in (0, 1), done.err
    return done.code, json.loads(done.out)


def check_shape(report_: dict[str, Any]) -> None:
    assert report_.keys() == {"level", "nodes", "findings", "pairs", "collectives"}
    levels = [finding["level"] for finding in report_["findings"]]
    assert report_["level"] == levels[0]
    assert levels == sorted(levels, key=LEVELS.index, reverse=True)
    for finding in report_["findings"]:
        assert finding.keys() == {"check", "level", "fact", "cause", "fix", "node"}
        assert finding["fact"]
        assert finding["level"] == "green" or finding["fix"]


def test_quick_look_at_this_machine() -> None:
    code, report_ = doctor("--quick")
    check_shape(report_)
    assert {finding["check"] for finding in report_["findings"]} == CHECKS
    assert code == (report_["level"] == "red")
    assert report_["nodes"] == [socket.gethostname()]
    assert report_["pairs"] == []


def test_whole_doctor_runs_two_ranks_and_leaves_no_run() -> None:
    code, report_ = doctor()
    check_shape(report_)
    assert code == (report_["level"] == "red")
    facts = {finding["check"]: finding for finding in report_["findings"]}
    assert facts["reach"]["level"] == facts["links"]["level"] == facts["all_reduce"]["level"] == "green"
    assert [one["ranks"] for one in report_["collectives"]][:2] == [2, 2]
    (pair,) = report_["pairs"]
    assert pair["local"]
    assert min(pair["latency"], pair["there"], pair["back"]) > 0
    assert phalanx("ps", "--all").out == "no runs yet\n"


@pytest.mark.extended
def test_doctor_that_is_ended_ends_its_test() -> None:
    job = start("doctor")
    # The agent, the fork server and its children: the test run has started.
    until(lambda: len(descendants(job.pid)) >= 4, 30, "the ranks of the test")
    job.signal(signal.SIGTERM)
    assert job.wait(30) == 143
    assert descendants(job.pid) == []
    assert os.listdir(os.environ["TMPDIR"]) == []


def test_words_on_the_screen() -> None:
    done = phalanx("doctor", "--quick")
    assert f"torch {torch_build.read()['__version__']}" in done.out
    assert done.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hosts", "a,,b"), "--hosts a,,b cannot be used: it has an empty entry"),
        (("--hostfile", "/nowhere"), "the host file /nowhere cannot be read: No such file or directory"),
    ],
)
def test_hosts_that_cannot_be_read(arguments: tuple[str, ...], words: str) -> None:
    done = phalanx("doctor", *arguments)
    assert done.code == 2
    assert words in done.err
    assert "fix: phalanx doctor --hosts" in done.err


def in_mount(options: str, then: str = "true") -> dict[str, Any]:
    """Return findings about a home on a separate mount, in a namespace that exists only for this call."""
    home = os.environ["PHALANX_HOME"]
    os.makedirs(home)
    command = shlex.join([*PHALANX, "doctor", "--quick", "--json"])
    script = f"mount -t tmpfs -o {options} none {home} && {{ {then}; }} && exec {command}"
    done = run(("unshare", "-m", "sh", "-c", script))
    assert done.code == 1, done.out + done.err
    report_: dict[str, Any] = json.loads(done.out)
    check_shape(report_)
    return next(finding for finding in report_["findings"] if finding["check"] == "disk")


@root
def test_home_that_is_read_only_is_red() -> None:
    finding = in_mount("size=200m,ro")
    assert finding["level"] == "red"
    assert "cannot be written: Read-only file system" in finding["fact"]
    assert "PHALANX_HOME" in finding["fix"]


@root
def test_home_that_is_full_is_red() -> None:
    finding = in_mount("size=1m", "head -c 2000000 /dev/zero > $PHALANX_HOME/x || true")
    assert "is full: 0 B free of 1 MiB" in finding["fact"]


@root
def test_home_without_inodes_is_red() -> None:
    finding = in_mount("size=200m,nr_inodes=4", "touch $PHALANX_HOME/1 $PHALANX_HOME/2 $PHALANX_HOME/3")
    assert "has no free inodes" in finding["fact"]


def test_home_below_a_file_is_red(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [finding.level for finding in disk.judge(disk.read(f"{tmp_path}/file/home"))] == ["red"]


def test_home_that_is_not_there_yet_is_fine_and_stays_so(tmp_path: Path) -> None:
    facts = disk.read(f"{tmp_path}/a/b")
    assert (facts.existing, facts.trouble) == (str(tmp_path), "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 3])
def test_survey(ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = phalanx("run", "-g", str(ranks), "--cpu", "-m", "phalanx.doctor.survey", str(out), "--print", timeout=120)
    assert done.code == 0, done.err
    found = result.decode(out.read_bytes())
    assert result.find(done.raw_out) == found
    host = socket.gethostname()
    assert found.nodes == tuple(f"{host} (rank {rank})" for rank in range(ranks))
    assert {finding.node for finding in found.machines} == {host}
    assert {finding.check for finding in found.machines} == CHECKS
    assert [(pair.one[-2], pair.other[-2]) for pair in found.pairs] == [("0", "1"), ("0", "2"), ("1", "2")][
        : 2 * ranks - 3
    ]
    assert [(one.backend, one.ranks, one.right) for one in found.collectives[:2]] == [("gloo", ranks, True)] * 2
    assert {finding.level for finding in found.between} == {"green"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.extended
def test_survey_that_measures_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ("run", "-g", "2", "--cpu", "-m", "phalanx.doctor.survey", str(out), "--quick")
    assert phalanx(*words, timeout=120).code == 0
    found = result.decode(out.read_bytes())
    assert (found.pairs, found.collectives) == ((), ())
    assert "reach" in {finding.check for finding in found.between}


@pytest.mark.extended
def test_survey_in_which_gloo_fails_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ("run", "-g", "2", "--cpu", "-m", "phalanx.doctor.survey", str(out))
    done = phalanx(*words, timeout=120, env={"GLOO_SOCKET_IFNAME": "no-such-if"})
    assert done.code == 0, done.err
    found = result.decode(out.read_bytes())
    (red,) = [finding for finding in found.between if finding.level == "red"]
    assert "cannot work together over gloo" in red.fact
    assert "no-such-if" in red.fact
    assert "reach" in {finding.check for finding in found.between}


def test_preflight_is_silent_here(tmp_path: Path) -> None:
    for nodes in (1, 4):
        assert preflight(str(tmp_path / "home"), nodes=nodes, ranks=8) == []


def test_preflight_reports_a_red_finding(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = preflight(f"{tmp_path}/file/home", nodes=1)
    assert (finding.check, finding.level) == ("disk", "red")


def test_preflight_counts_the_files_of_the_ranks(tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from phalanx.doctor.preflight import preflight\n"
        f"print([(f.check, f.level) for f in preflight({str(tmp_path)!r}, nodes=1, ranks=100)])"
    )
    assert python("-c", code).out == "[('limits', 'red')]\n"


def test_preflight_is_quick_and_imports_little(tmp_path: Path) -> None:
    def once() -> float:
        began = time.perf_counter()
        preflight(str(tmp_path), nodes=2)
        return time.perf_counter() - began

    assert statistics.median(once() for _ in range(7)) < 0.1
    code = (
        "import sys, phalanx.doctor.preflight\n"
        "print({'torch', 'psutil', 'pynvml', 'msgspec', 'subprocess', 'rich'} & sys.modules.keys())"
    )
    assert python("-c", code).out == "set()\n"


def test_facts_of_this_machine_can_be_sent(tmp_path: Path) -> None:
    import msgspec

    facts = machine.read({}, str(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(facts), type=machine.MachineFacts) == facts
    assert facts.versions.python == sys.version.split()[0]
    assert limits.read() == facts.limits


def test_names_that_lead_nowhere_or_somewhere() -> None:
    assert names.read("no-such-host.invalid").trouble
    assert names.read("localhost").addresses[0] in ("127.0.0.1", "::1")
    assert names.read("a" * 300).trouble  # not a valid name


def _listener() -> socket.socket:
    """Listen on a port that the kernel does not assign by itself, so that no connection of another test gets it."""
    for port in range(21000, 29000, 7):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no port is free")


def test_port_in_use_names_its_holder() -> None:
    with _listener() as listener:
        port = listener.getsockname()[1]
        facts = ports.read(port)
        assert not facts.free
        assert f"process {os.getpid()} " in facts.holder
    assert ports.read(port).free


def test_echo_answers_with_its_time_and_identity() -> None:
    echo = Echo()
    try:
        trouble, samples = reach.ask("127.0.0.1", echo.port, echo.nonce, times=4)
        assert (trouble, len(samples)) == ("", 4)
        offset = clock.best(samples)
        assert offset is not None
        assert abs(offset.ahead) <= offset.error + 0.001
        assert reach.ask("127.0.0.1", echo.port, bytes(16))[0] == "another machine answers there"
    finally:
        echo.close()
    assert reach.ask("127.0.0.1", 1, bytes(16))[0] == "Connection refused"
