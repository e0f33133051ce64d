"""Small parts of the launcher: command lines, preload hints, messages with descriptors, run folders, warm pools."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.contract import events
from phalanx.contract.run_metadata import GitState, GpuInfo, Machine, RunMetadata
from phalanx.errors import LaunchError, PortError, ScriptError
from phalanx.forkserver import linux, wire
from phalanx.forkserver.warm import WarmForkServer
from phalanx.launcher.command import Command
from phalanx.launcher.coordination import port
from phalanx.launcher.forking import preload_hints, warm_pool
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord
from tests.kit.cli import until

# -- command


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("script", ["py", "-u", "t.py", "--local-rank=2", "2", "$x"]),
        ("module", ["py", "-u", "-m", "t.py", "--local-rank=2", "2", "$x"]),
        ("program", ["t.py", "--local-rank=2", "2", "$x"]),
    ],
)
def test_the_command_of_a_rank(kind: str, line: list[str]) -> None:
    command = Command(kind, "t.py", ("${local_rank}", "$$x"), "py", "--local-rank")  # type: ignore[arg-type]
    assert command.line(2) == line


def test_bad_scripts(tmp_path: Path) -> None:
    for name in ("train.py", "syn.py", "nb1.py"):
        (tmp_path / name).write_text("")
    cases = {
        str(tmp_path / "nope.py"): f"looked in {tmp_path}\n  fix",  # none is alike
        str(tmp_path / "trian.py"): "did you mean train.py?",
        str(tmp_path): "directory without a __main__.py",
        str(tmp_path / "no/where.py"): "there is no folder",
    }
    for path, words in cases.items():
        with pytest.raises(ScriptError) as caught:
            Command("script", path, (), "py").check()
        assert words in str(caught.value)
        assert caught.value.fix
    (tmp_path / "__main__.py").write_text("")
    Command("script", str(tmp_path), (), "py").check()


# -- preload hints


@pytest.mark.parametrize(
    ("text", "trains"),
    [
        ("opt = torch.optim.AdamW(model.parameters())", True),
        ("from torch import optim", True),
        ("model = torch.compile(model)", True),
        ("dist.all_reduce(x)", False),
        ("optimal = 1", False),
    ],
)
def test_a_training_script_is_known_by_its_text(text: str, trains: bool) -> None:
    assert bool(preload_hints.guess(text)) == trains


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("import phalanx", True),
        ("  from phalanx import Run", True),
        ("import os, sys, phalanx", True),
        ("import os,phalanx", True),
        ("import torch.nn as nn, phalanx as px, sys", True),
        ("import os, sys  # as phalanx does", False),
        ("import phalanx_tools, not_phalanx, tools.phalanx", False),
        ("# import phalanx", False),
        ("print('import phalanx')", False),
        ("import os\nphalanx = 1", False),
    ],
)
def test_a_script_that_uses_phalanx_is_known_by_its_imports(line: str, uses: bool) -> None:
    assert ("phalanx.train" in " ".join(preload_hints.guess(f"import torch\n{line}\n"))) == uses


def test_hints_contain_only_what_is_safe(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import torch.optim")
    command = Command("script", str(tmp_path / "t.py"), (), "py")
    hints = preload_hints.load(command, str(tmp_path), {})
    assert hints.modules == ("torch._dynamo",)
    Path(hints.path).write_text(json.dumps(["torch.fx", "mpi4py", "torch._inductor.config", "numpy.fft", 3, "mine"]))
    assert preload_hints.load(command, str(tmp_path), {}).modules == ("torch._dynamo", "torch.fx", "numpy.fft")
    hints.refuse()
    assert preload_hints.load(command, str(tmp_path), {}).modules == ()


def test_hints_about_variables_are_valid_for_the_text_of_the_script_only(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text('import os\nos.environ["TORCH_LOGS"] = "a"\nimport torch')
    command = Command("script", str(tmp_path / "t.py"), (), "py")

    def recall() -> preload_hints.PreloadHints:
        return preload_hints.load(command, str(tmp_path), {})

    assert recall().applied({"TORCH_LOGS": "b", "X": "1"}) == {"TORCH_LOGS": "a", "X": "1"}
    recall().learned([{"OMP_NUM_THREADS": "2", "TORCH_LOGS": None}]).save()
    assert recall().applied({"TORCH_LOGS": "b", "X": "1"}) == {"X": "1", "OMP_NUM_THREADS": "2"}
    assert recall().varying == ()  # the guess was wrong, without other effects
    recall().learned([{"OMP_NUM_THREADS": "3"}]).save()
    assert recall().varying == ("OMP_NUM_THREADS",)
    (tmp_path / "t.py").write_text("import torch")
    assert recall().variables == {}
    recall().learned([{"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "3"}]).save()
    assert recall().varying == ("OMP_NUM_THREADS",)


# -- wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(), x, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_messages_arrive_as_they_were(message: dict[str, object]) -> None:
    left, right = socket.socketpair()
    with left, right:
        wire.send(left, message)
        assert wire.receive(right) == (message, [])


def test_a_large_message_with_descriptors() -> None:
    left, right = socket.socketpair()
    message = {"environ": {f"NAME{number}": "x" * 1000 for number in range(2000)}}
    read, write = os.pipe()
    with left, right:
        sender = threading.Thread(target=wire.send, args=(left, message, [read, write]))
        sender.start()
        received = wire.receive(right)
        sender.join()
        assert received is not None
        assert received[0] == message
        assert len(received[1]) == 2
        for fd in (read, write, *received[1]):
            os.close(fd)
        left.close()
        assert wire.receive(right) is None


# -- run folders


def test_a_run_with_the_same_id_gets_its_own_folder(tmp_path: Path) -> None:
    made = [run_folder.create("none", base=str(tmp_path), log_dir=None) for _ in range(3)]
    assert len({folder.path for folder in made}) == 3
    for folder in made:
        folder.close()


def test_runs_are_remembered(tmp_path: Path) -> None:
    base = str(tmp_path / "home")
    pid = os.getpid()
    for number, (name, log_dir) in enumerate([("a", None), ("b", str(tmp_path / "logs"))]):
        folder = run_folder.create(name, base=base, log_dir=log_dir)
        folder.record(RunRecord(name, pid, linux.start_time(pid) or 0, ["t.py"], "/", folder.path, 2, float(number)))
        if name == "a":
            folder.ended(3)
        folder.close()
    (tmp_path / "home/runs/broken").mkdir()
    (tmp_path / "home/runs/broken/run.json").write_text("{")
    first, second = run_folder.all_runs(base)
    assert (first.id, first.state, first.alive) == ("a", "failed (3)", False)
    assert (second.id, second.state, second.alive) == ("b", "running", True)
    assert second.folder == str(tmp_path / "logs/b")


def test_a_pid_that_was_given_to_someone_else_is_not_the_run() -> None:
    record = RunRecord("a", os.getpid(), 1, [], "/", "", 1, time.time())
    assert record.state == "killed"


def test_ids_are_names(tmp_path: Path) -> None:
    assert run_folder.make_run_id("/x/my train!.py").startswith("my-train--")
    assert run_folder.make_run_id("/").startswith("run-")


def test_home() -> None:
    assert run_folder.home({"PHALANX_HOME": "/x"}) == "/x"
    assert run_folder.home({"XDG_STATE_HOME": "/s"}) == "/s/phalanx"


# -- events


def test_every_event_survives_the_file() -> None:
    metadata = RunMetadata(
        run="a.2",
        name="a",
        started=1.5,
        command=("python", "t.py"),
        script="/t.py",
        hyperparameters={"lr": 0.1, "epochs": 3, "amp": True, "data": "x", "limit": None},
        git=GitState(root="/", commit="f" * 40, dirty=True),
        machine=Machine(host="h", gpus=(GpuInfo(index=0, name="H200"),)),
    )
    for kind in events.AnyEvent.__args__:
        values = {"time": 1.5}
        for field in kind.__struct_fields__:
            if field not in values and field not in kind.__struct_defaults__:
                hint = kind.__annotations__.get(field, "str")
                some = {"int": 3, "float": 2.0, "str": "x", "bool": True, "tuple[str, ...]": ("a",)}
                some |= {"tuple[int, ...]": (3,), "FaultKind": "node-joined", "RunMetadata": metadata}
                values[field] = some.get(hint, () if "tuple" in hint else {})
        event = kind(**values)
        assert events.decode(events.encode(event)) == event


# -- port


def test_a_port_in_use_names_its_holder() -> None:
    with port.listen("127.0.0.1", 0) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(PortError) as caught:
            port.listen("127.0.0.1", number)
    assert f"port {number} on 127.0.0.1 is in use" in str(caught.value)
    assert f"held by pid {os.getpid()}" in str(caught.value)


def test_the_command_of_its_holder_is_one_line() -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], '\x1b', flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        number = int(holder.stdout.readline().split()[0])
        with pytest.raises(PortError) as caught:
            port.listen("127.0.0.1", number)
        holder.communicate(b"\n")
    (line,) = [line for line in str(caught.value).splitlines() if f"held by pid {holder.pid}" in line]
    assert "import socket\\ns = socket" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("address", "words"),
    [("192.0.2.1", "not an address of this machine"), ("no.such.host.invalid", "does not resolve")],
)
def test_an_address_that_cannot_be_had(address: str, words: str) -> None:
    with pytest.raises(PortError, match=words):
        port.listen(address, 0)


def test_ranks_of_hundreds_of_nodes_may_connect_before_the_store_runs() -> None:
    with port.listen("127.0.0.1", 0) as sock:
        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        queued = int.from_bytes(facts[28:], sys.byteorder)  # tcpi_sacked: of a listening socket, its backlog
    assert queued == min(4096, int(Path("/proc/sys/net/core/somaxconn").read_text()))


# -- warm


def test_the_key_is_of_what_imports_depend_on(tmp_path: Path) -> None:
    def key(**environ: str) -> str:
        return warm_pool.place(str(tmp_path), "/usr/bin/python3", {"HOME": "/h", **environ}).key

    assert key() == key(RANK="3", CUDA_VISIBLE_DEVICES="1", EDITOR="ed")
    assert len({key(), key(OMP_NUM_THREADS="1"), key(PYTHONPATH="/x"), key(TORCH_LOGS="all")}) == 4


def test_the_key_is_of_the_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_pool.sysconfig, "get_path", lambda _: str(tmp_path))
    before = warm_pool.place("/b", "/usr/bin/python3", {}).key
    assert warm_pool.place("/b", "/usr/bin/python3", {}).key == before
    (tmp_path / "new-1.0.dist-info").mkdir()
    assert warm_pool.place("/b", "/usr/bin/python3", {}).key != before


def test_a_socket_whose_owner_was_killed_is_no_warm_fork_server(tmp_path: Path) -> None:
    path = tmp_path / "warm" / "k.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    assert warm_pool.find(warm_pool.WarmPool(str(path.parent), "k"), []) is None
    assert warm_pool.status(str(path)) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_warm_fork_server_of_another_user_is_refused(tmp_path: Path) -> None:
    """The file is ours, but a process of another user listens, as the kernel reports."""
    path = str(tmp_path / "k.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        program = "import os, socket, sys; os.setuid(12345); sock = socket.socket(fileno=int(sys.argv[1])); "
        program += "sock.listen(); print(flush=True); sys.stdin.read()"
        words = [sys.executable, "-c", program, str(sock.fileno())]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(sock.fileno(),)
        ) as listener:
            assert listener.stdout is not None
            assert listener.stdout.readline() == b"\n"
            with pytest.raises(LaunchError, match="a process of another user listens"):
                warm_pool.status(path)
            listener.communicate()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_warm_fork_server_that_is_stopped_is_not_waited_for(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is importing is waited for, however long that takes."""
    monkeypatch.setattr(warm_pool, "_STOPPED", 0.2)
    monkeypatch.setattr(warm_pool, "_INTERVAL", 0.1)
    pool = warm_pool.WarmPool(str(tmp_path), "k")
    program = "import socket, sys; sock = socket.socket(fileno=int(sys.argv[1])); sock.listen(); print(flush=True); "
    program += "sys.stdin.read(1); sock.accept()[0].close()"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(pool.socket)
        words = [sys.executable, "-c", program, str(sock.fileno())]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(sock.fileno(),)
        ) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            assert server.stdout.readline() == b"\n"
            imported = threading.Event()

            def end_import() -> None:
                imported.set()
                if server.stdin is not None:
                    os.write(server.stdin.fileno(), b".")

            if stopped:
                server.send_signal(signal.SIGSTOP)
                until(lambda: linux.state(server.pid) == "stopped", 60, "the process to stop")
            else:
                threading.Timer(1.0, end_import).start()
            assert warm_pool.find(pool, []) == "it did not answer"
            assert imported.is_set() is not stopped
            server.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user's")
def test_a_socket_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "k.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        os.chown(path, 12345, 12345)
        with pytest.raises(LaunchError, match=r"k\.sock belongs to another user"):
            warm_pool.status(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize(("user", "answered"), [(12345, False), (0, True)])
def test_a_warm_fork_server_answers_its_own_user_only(user: int, answered: bool, tmp_path: Path) -> None:
    """Regardless of the file system: here every user may connect."""
    path = str(tmp_path / "k.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(path)
        listener.listen()
        program = "import os, socket, sys; sock = socket.socket(fileno=int(sys.argv[1])); os.chdir(sys.argv[3]); "
        program += "os.setuid(int(sys.argv[2])); sock.connect('k.sock')"
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        os.chmod(path, 0o666)
        words = [sys.executable, "-c", program, str(caller.fileno()), str(user), str(tmp_path)]
        subprocess.run(words, pass_fds=(caller.fileno(),), check=True)
        wire.send(caller, {"do": "status"})
        connection, _ = listener.accept()
        WarmForkServer(listener, path, 60.0)._handle_connection(connection, (-1, -1))
        try:
            received = wire.receive(caller)
        except ConnectionResetError:
            received = None
        assert (received is not None) is answered


def test_modules_of_phalanx_ignore_the_current_folder() -> None:
    ours = Command("module", "phalanx.doctor.survey", (), "py")
    assert ours.line(0) == ["py", "-u", "-P", "-m", "phalanx.doctor.survey"]
    assert ours.path0 is None
    theirs = Command("module", "phalanxes", (), "py")
    assert theirs.line(0) == ["py", "-u", "-m", "phalanxes"]
    assert theirs.path0 == os.getcwd()
