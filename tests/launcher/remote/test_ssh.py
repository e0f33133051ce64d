"""Links to hosts, without a host: real child processes that answer, are noisy, or end like ssh."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys

import msgspec
import pytest

from phalanx.cli.host_specs import options_of
from phalanx.cli.options import RunOptions, parse_run
from phalanx.cluster.sources.hosts import parse_hosts
from phalanx.errors import JoinError
from phalanx.launcher.remote import node_spec, ssh, ssh_errors
from phalanx.launcher.remote.node_spec import Go, NodeRefused, NodeSpec, Ready, Signal
from phalanx.launcher.remote.ssh import SshStarter
from phalanx.launcher.remote.ssh_link import AnswerParser, SshLink

READY = 'phalanx-node {"is": "ready", "host": "b", "pid": 7}'


class Received:
    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.error: JoinError | None = None
        self.codes: dict[str, int] = {}
        self.done = asyncio.Event()

    def ready(self, link: SshLink) -> None:
        self.hosts.append(link.host)

    def failed(self, error: JoinError) -> None:
        self.error = error
        self.done.set()

    def ended(self, link: SshLink, code: int) -> None:
        self.codes[link.host] = code
        self.done.set()


def child(node: int, host: str, script: str) -> SshLink:
    process = ssh._spawn(["sh", "-c", script], os.environ)
    return SshLink(node, host, process, cwd="/work", python="/usr/bin/python3", near=False)


def listen(*links: SshLink, patience: float = 20) -> Received:
    async def run() -> Received:
        received = Received()
        starter = SshStarter(links, received, hosts=len(links), timeout=patience)
        starter.listen()
        await asyncio.wait_for(received.done.wait(), 20)
        await starter.end(together=False)
        return received

    return asyncio.run(run())


# -- messages


def test_words_survive_the_way() -> None:
    spec = NodeSpec(
        node=1,
        nodes=2,
        token="ab" * 32,
        options={"args": ["a b", "'\"$(id)`\n", "\udcff", "é"], "by": {"1": 2}},
        digest="",
        versions={"torch": "2"},
        env={"NCCL_DEBUG": "INFO"},
        home="",
        names=("a", "b"),
        promised=(2, 1),
        host=None,
        port=0,
    )
    for word in (spec, Go(addresses=("10.0.0.1", "fd00::1"), port=4), Signal(number=2)):
        line = node_spec.encode(word)
        assert line.count(b"\n") == 1
        assert node_spec.to_node(line) == word
    assert node_spec.from_node(node_spec.encode(NodeRefused(what="no"))) == NodeRefused(what="no")
    with pytest.raises(ValueError, match="order"):
        node_spec.from_node(node_spec.encode(spec))


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("-m", "pkg.train", "a b", "--x", "$(id)\n'\"", "\udcff"),
        ("--tee", "0:1,1:3", "-r", "3", "--env", "A=b=c", "--show-ranks", "0,2", "--preload", "torch", "train.py"),
        ("--signals-to-handle", "SIGTERM,SIGUSR1", "--max-restarts", "3", "--keep-warm", "5m", "train.py"),
    ],
)
def test_options_survive_the_way(words: tuple[str, ...]) -> None:
    options = parse_run(["--hosts", "a:2,b:0-1,3", *words], {})
    hosts = options.nodes.hosts
    assert hosts is not None
    own = options_of(options, hosts, 1, near=False, run_id="run-1")
    base = NodeSpec(
        node=1,
        nodes=2,
        token="",
        options=msgspec.to_builtins(own, str_keys=True),
        digest="",
        versions={},
        env={},
        home="",
        names=(),
        promised=(),
        host=None,
        port=0,
    )
    there = node_spec.to_node(node_spec.encode(base))
    assert isinstance(there, NodeSpec)
    assert msgspec.convert(there.options, RunOptions, str_keys=True) == own
    assert (own.workers.devices, own.workers.count) == (("0-1", "3"), None)
    assert (own.script.stdin_rank, own.nodes.hosts) == (None, None)
    for name in ("kind", "target", "args", "env"):
        assert getattr(own.script, name) == getattr(options.script, name)
    for name in ("output", "shutdown", "start", "recovery"):
        assert getattr(own, name) == getattr(options, name)


def test_each_host_gets_its_own_share() -> None:
    options = parse_run(["--hosts", "a:8,b:2,c", "--no-auth", "--token-file", "t", "train.py"], {})
    assert options.nodes.hosts is not None
    mine = [options_of(options, options.nodes.hosts, node, near=node == 0) for node in range(3)]
    assert [own.workers.count for own in mine] == [8, 2, None]
    assert [own.script.stdin_rank for own in mine] == [0, None, None]
    assert not any(own.rendezvous.no_auth or own.rendezvous.token_file for own in mine)
    first = dataclasses.replace(
        mine[1],
        nodes=dataclasses.replace(mine[1].nodes, node_rank=0),
        workers=dataclasses.replace(mine[1].workers, count=8),
        script=dataclasses.replace(mine[1].script, stdin_rank=0),
    )
    assert first == mine[0]


def test_the_number_of_workers_per_host() -> None:
    assert [host.workers for host in parse_hosts("a:8,b:0-3,7,c")] == [8, 5, None]


def test_variables_that_are_sent_to_other_nodes() -> None:
    mine = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "lib",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTHONHOME": "/x",
        "PHALANX_TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "AWS_SECRET": "x",
    }
    assert set(node_spec.chosen(mine)) == {"NCCL_DEBUG", "PYTHONPATH", "CUDA_LAUNCH_BLOCKING"}


# -- the command over there


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_command_reaches_python_in_the_folder_whatever_its_name(shell: str, tmp_path: object) -> None:
    folder = f'{tmp_path}/it\'s a $(touch bad) "folder"\n-x'
    os.mkdir(folder)
    python = f"{folder}/py thon"
    with open(python, "w") as file:
        file.write('#!/bin/sh\npwd\necho "$@"\n')
    os.chmod(python, 0o755)
    done = subprocess.run([shell, "-c", ssh.command(folder, python)], capture_output=True, text=True, cwd="/")
    assert done.stdout == f"{folder}\n-P -m phalanx node\n"


@pytest.mark.parametrize(
    ("cwd", "python", "code"),
    [("/no/where", sys.executable, ssh_errors.NO_FOLDER), ("/", "/no/python", ssh_errors.NO_PYTHON)],
)
def test_the_command_says_by_its_code_what_is_missing(cwd: str, python: str, code: int) -> None:
    done = subprocess.run(["sh", "-c", ssh.command(cwd, python)], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


# -- links


def test_a_noisy_shell_is_skipped_and_what_follows_the_answer_is_output() -> None:
    link = child(0, "b", f"echo Welcome; printf 'to b> '; echo '{READY}'; printf 'out 1'; echo oops >&2; exit 3")
    shown = bytearray()
    link.out = shown.extend
    received = listen(link)
    assert (received.hosts, received.codes, received.error) == (["b"], {"b": 3}, None)
    assert link.answer == Ready(host="b", pid=7)
    assert bytes(shown) == b"out 1"
    assert list(link.stderr) == ["oops"]


def test_endless_noise_is_not_waited_for() -> None:
    received = listen(child(0, "b", "yes hello"))
    assert received.error is not None
    assert received.error.what.startswith("b: it keeps writing")


def test_all_that_fail_are_reported_at_once() -> None:
    received = listen(
        child(0, "a", "sleep 0.3; exit 93"),
        child(1, "b", "echo 'b: Permission denied (publickey).' >&2; exit 255"),
        child(2, "c", f"echo '{READY}'; cat"),
    )
    text = str(received.error)
    assert received.hosts == ["c"]
    assert text.startswith("2 of 3 hosts cannot take part")
    assert "a: the current folder does not exist there" in text
    assert "/work" in text
    assert "b: Permission denied (publickey)." in text
    assert "ssh-copy-id b" in text


def test_a_host_that_never_answers() -> None:
    received = listen(child(0, "b", "cat"), patience=0.1)
    assert received.error is not None
    assert received.error.what.startswith("b: it has not answered")


@pytest.mark.parametrize(
    ("script", "what", "fix"),
    [
        ("exit 94", "no such Python", "PHALANX_REMOTE_PYTHON"),
        ("echo '/p: No module named phalanx' >&2; exit 1", "not installed", "pip install phalanx"),
        ("echo 'ssh: Could not resolve hostname b' >&2; exit 255", "ssh cannot connect", "correct the name"),
        ("echo 'Host key verification failed.' >&2; exit 255", "ssh cannot connect", "compare the key"),
        ("echo 'connect: Connection refused' >&2; exit 255", "ssh cannot connect", "ssh b true shows the same"),
        ("echo 'ImportError: no msgspec' >&2; exit 1", "ended before it could answer", ""),
        ("echo 'phalanx-node {}'; cat", "not an answer of phalanx", "same version"),
    ],
)
def test_why_a_host_does_not_answer(script: str, what: str, fix: str) -> None:
    received = listen(child(0, "b", script))
    assert received.error is not None
    assert what in received.error.what
    assert received.error.what.startswith("b: ")
    assert fix in received.error.fix


def test_the_last_message_of_a_node_is_its_error() -> None:
    link = child(
        0, "b", f"echo '{READY}'; printf 'phalanx: the token differs\\n  ours: x\\n  fix: do y\\n' >&2; exit 1"
    )
    listen(link)
    assert ssh_errors.explain_end(link, 1) == NodeRefused(what="the token differs", details=("ours: x",), fix="do y")
    assert ssh_errors.explain_end(link, 255).what == "the ssh connection ended"


def test_a_long_order_does_not_hold_us_up() -> None:
    link = child(0, "b", f"sleep 0.2; head -c 3000000 > /dev/null; echo '{READY}'")
    link.send(NodeRefused(what="x" * 3_000_000))
    assert listen(link).hosts == ["b"]


@pytest.mark.parametrize(
    ("parts", "answers", "rest"),
    [
        ([f"{READY}\n"], Ready(host="b", pid=7), ""),
        (["Welcome\nto b: ", READY[:9], READY[9:], "\nfirst line"], Ready(host="b", pid=7), "first line"),
        (["Welcome\n", "x" * 100], None, "x" * 100),
        (["phalanx-node {}\n"], "its answer is not an answer of phalanx", ""),
        (["yy\n" * (1 << 20)], "it keeps writing before phalanx can start", ""),
    ],
)
def test_the_answer_of_a_host(parts: list[str], answers: Ready | str | None, rest: str) -> None:
    parser, found = AnswerParser("b"), None
    for part in parts:
        assert found is None
        found = parser.feed(part.encode())
    if isinstance(answers, str):
        assert isinstance(found, NodeRefused)
        assert found.what.startswith(answers)
    else:
        assert found == answers
    assert parser.rest == rest.encode()
