"""What a worker gets: input, variables set before the import, a store on loopback; and which fork server starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from phalanx.contract import events
from tests.e2e.places import script
from tests.kit import proc
from tests.kit.cgroup import cgroup
from tests.kit.cli import free_port, phalanx, python, run, start, terminal, warm

pytestmark = pytest.mark.xdist_group("workers")  # some share a warm fork server


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def printed_events(err: str) -> list[events.AnyEvent]:
    path = err[err.index("output in ") :].split("output in ", 1)[1].splitlines()[0]
    return [events.decode(line) for line in Path(path, "events.jsonl").read_bytes().splitlines()]


def way(err: str) -> str:
    return next(event.mode for event in printed_events(err) if isinstance(event, events.ForkServerReady))


# Whether the fork server has imported it: a script does not see it before its own import.
IMPORTED = (
    "import sys; layers = sys.modules['_phalanx_forkserver.imports.preload'].modules._layers; "
    "print(any('torch._dynamo' in layer.modules for layer in layers), 'torch._dynamo' in sys.modules)"
)

# `phalanx ARGS`, which prints whether the agent is imported when it begins to wait for an answer of the fork server.
FIRST_ANSWER = """
import sys
from phalanx.cli.main import main
from phalanx.forkserver import wire

def receive(*args):
    print("the agent is imported:", "phalanx.launcher.agent.agent" in sys.modules, flush=True)
    wire.receive = received
    return received(*args)

received, wire.receive = wire.receive, receive
sys.exit(main(sys.argv[1:]))
"""

ECHO = "import sys, os; print(os.environ['RANK'], repr(sys.stdin.read()))"


@pytest.mark.smoke
@pytest.mark.warmed
@pytest.mark.parametrize(
    ("options", "reader"), [((), "0"), (("--stdin", "1"), "1"), (("--stdin", "none"), None)], ids=["0", "1", "none"]
)
def test_stdin_goes_to_one_rank(tmp_path: Path, options: tuple[str, ...], reader: str | None) -> None:
    write(tmp_path, echo=ECHO)
    result = phalanx("run", "-g", "2", "--cpu", *options, "echo.py", input="hello", cwd=str(tmp_path))
    read = dict(re.findall(r"\[\d\] (\d) (.*)", result.out))
    assert read == {rank: "'hello'" if rank == reader else "''" for rank in ("0", "1")}


@pytest.mark.smoke
@pytest.mark.warmed
def test_a_terminal_can_be_read_from(tmp_path: Path) -> None:
    write(tmp_path, ask="import os\nif os.environ['RANK'] == '0': print('hello', input('who? '))\n")
    job = terminal("run", "-g", "2", "--cpu", "ask.py", cwd=str(tmp_path))
    job.wait_for("who? ")
    job.send(b"ada\n")
    job.wait_for("hello ada")
    assert job.wait() == 0


def test_variables_that_imports_read_are_set_before_the_import(tmp_path: Path) -> None:
    write(tmp_path, threads="import torch, os; print(torch.get_num_threads(), os.environ['MINE'])")
    given = phalanx(
        "run", "-g", "1", "--cpu", "--env", "OMP_NUM_THREADS=2", "--env", "MINE=x", "threads.py", cwd=str(tmp_path)
    )
    assert given.out == "2 x\n"
    several = phalanx("run", "-g", "2", "--cpu", "--env", "MINE=y", "threads.py", cwd=str(tmp_path))
    assert sorted(several.out.splitlines()) == ["[0] 1 y", "[1] 1 y"]


def test_preload_is_imported_once_and_before_the_fork(tmp_path: Path) -> None:
    write(tmp_path, slow="import os\npid = os.getpid()", main="import slow, os; print(slow.pid == os.getppid())")
    result = phalanx("run", "-g", "2", "--cpu", "--preload", "slow", "main.py", cwd=str(tmp_path))
    assert result.out.count("True") == 2, result.err


def test_preload_of_what_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, main="")
    result = phalanx("run", "-g", "2", "--cpu", "--preload", "nowhere", "main.py", cwd=str(tmp_path))
    assert result.code == 1
    assert "--preload nowhere cannot be imported: ModuleNotFoundError" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            "import threading as t, time\nt.Thread(target=time.sleep, args=(60,), daemon=True, name='poller').start()",
            "poller",
        ),
        # No GPU here: the flag that torch itself uses replaces a CUDA context.
        ("import torch\ntorch.cuda.is_initialized = lambda: True", "CUDA was initialised"),
    ],
    ids=["thread", "cuda"],
)
def test_a_fork_server_that_is_not_safe_to_fork_says_so_and_fresh_ones_start(
    tmp_path: Path, module: str, reason: str
) -> None:
    write(tmp_path, bad=module, main="import os, sys; print('pid', os.getpid(), 'torch' in sys.modules)")
    result = phalanx("run", "-g", "2", "--cpu", "--preload", "bad", "main.py", cwd=str(tmp_path))
    assert result.code == 0
    assert result.out.count("False") == 2
    assert reason in result.err
    assert "its own interpreter" in result.err
    assert way(result.err) == "fresh"


@pytest.mark.smoke
def test_fresh_and_no_python_never_import_torch(tmp_path: Path) -> None:
    write(tmp_path, main="import sys; print('torch' in sys.modules)")
    fresh = phalanx("run", "-g", "1", "--cpu", "--fresh", "main.py", cwd=str(tmp_path))
    assert fresh.out == "False\n"
    program = phalanx("run", "-g", "2", "--cpu", "--no-python", "printenv", "RANK")
    assert sorted(program.out.split()) == ["0", "1", "[0]", "[1]"]
    assert way(program.err) == "fresh"


@pytest.mark.smoke
def test_a_script_that_needs_no_torch_runs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    write(tmp_path, torch="raise ImportError('broken here')", main="print('fine')")
    result = phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path))
    assert (result.code, result.out) == (0, "fine\n")
    assert "torch.py has its name" in result.err


def test_what_a_script_imports_is_learned_for_the_next_run(tmp_path: Path) -> None:
    write(
        tmp_path,
        helper="import importlib\nimportlib.import_module('torch._dynamo')",
        main=f"{IMPORTED}; import helper",
    )
    first = phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path))
    second = phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path))
    assert (first.out, second.out) == ("False False\n", "True False\n")


def test_a_script_that_trains_is_recognised_before_its_first_run(tmp_path: Path) -> None:
    write(tmp_path, main=f"{IMPORTED}\nimport torch.optim\n")
    assert phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path)).out == "True False\n"


def test_c_streams_are_flushed_though_destructors_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, main="import ctypes\nctypes.CDLL(None).printf(b'from C')\n")
    assert phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path)).out == "from C"


def test_own_modules_are_read_again_every_time(tmp_path: Path) -> None:
    write(tmp_path, mine="value = 1", main="import mine; print(mine.value)")
    assert phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path)).out == "1\n"
    write(tmp_path, mine="value = 2")
    assert phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path)).out == "2\n"


@pytest.mark.smoke
@pytest.mark.warmed
def test_the_store_listens_on_loopback_alone(tmp_path: Path) -> None:
    write(
        tmp_path,
        main="import os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "rows = [line.split() for table in ('tcp', 'tcp6') for line in open(f'/proc/net/{table}')]\n"
        "print([row[1] for row in rows if row[3] == '0A' and row[1].endswith(f':{port:04X}')])\n"
        "dist.destroy_process_group()\n",
    )
    result = phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path))
    assert re.fullmatch(r"\['0100007F:[0-9A-F]{4}'\]\n", result.out), result.out + result.err


@pytest.mark.smoke
def test_a_given_port_is_the_one_that_workers_meet_at() -> None:
    port = str(free_port())
    asked = ("--master-port", port, "--no-python", "printenv", "MASTER_ADDR", "MASTER_PORT")
    result = phalanx("run", "-g", "2", "--cpu", *asked)
    assert sorted(re.findall(r"\] (.*)", result.out)) == sorted(["127.0.0.1", port] * 2)


def test_what_imports_print_is_shown(tmp_path: Path) -> None:
    write(tmp_path, loud="import sys; print('loud is deprecated', file=sys.stderr)", main="print('fine')")
    result = phalanx("run", "-g", "2", "--cpu", "--preload", "loud", "main.py", cwd=str(tmp_path))
    assert result.out.count("fine") == 2
    assert result.err.count("loud is deprecated") == 1


def test_an_interpreter_that_is_a_shell_script_starts_every_rank(tmp_path: Path) -> None:
    # Python with -E ignores PYTHONPATH, and would go straight to the script.
    wrapper = tmp_path / "mypython"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    wrapper.chmod(0o755)
    write(tmp_path, main="import os; print('rank', os.environ['RANK'])")
    result = phalanx("run", "-g", "2", "--cpu", "main.py", cwd=str(tmp_path), env={"PYTHON_EXEC": str(wrapper)})
    assert sorted(re.findall(r"rank \d", result.out)) == ["rank 0", "rank 1"]
    assert way(result.err) == "fresh"


def test_two_runs_with_one_id_have_different_names(tmp_path: Path) -> None:
    write(tmp_path, main="import os; print(os.environ['TORCHELASTIC_RUN_ID'], os.environ['PHALANX_RUN'])")
    asked = ("run", "-g", "1", "--cpu", "--fresh", "--rdzv-id", "a/b", "--master-port", "0", "main.py")
    names = [phalanx(*asked, cwd=str(tmp_path)).out.split() for _ in range(2)]
    assert names[0] == ["a/b", "a-b"]
    assert names[1][0] == "a/b"
    assert names[1][1] == "a-b.2"


@pytest.mark.smoke
def test_a_process_that_the_kernel_refuses_is_reported() -> None:
    with cgroup("pids", "pids.max", 8) as enter:
        words = (sys.executable, "-m", "phalanx", "run", "-g", "12", "--cpu", "--no-python", "sleep", "600")
        result = run((*enter, *words))
    assert result.code == 1
    assert re.search(r"rank \d+ could not be started: .*Resource temporarily unavailable", result.err)
    assert "Traceback" not in result.err


@pytest.mark.smoke
@pytest.mark.warmed
def test_a_store_that_is_killed_is_replaced(tmp_path: Path) -> None:
    write(
        tmp_path,
        main="import os, datetime, psutil, torch.distributed as dist\n"
        "for child in psutil.Process(os.getppid()).children():\n"
        "    if child.pid != os.getpid(): child.kill()\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=20))\n"
        "print('joined'); dist.destroy_process_group()\n",
    )
    result = phalanx("run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path))
    assert result.out == "joined\n", result.err
    assert "replaced by a new, empty one" in result.err


# -- warm


def test_a_warm_fork_server_serves_one_run_after_another(tmp_path: Path) -> None:
    write(tmp_path, main=f"import sys; print(sys.argv, end=' '); {IMPORTED}")
    with warm():
        for word in ("a", "b"):
            result = phalanx("run", "-g", "2", "--cpu", "main.py", word, cwd=str(tmp_path))
            assert result.out.count(f"['main.py', '{word}'] True False") == 2
            assert way(result.err) == "warm"
        assert way(phalanx("run", "-g", "2", "--cpu", "--no-warm", "main.py", cwd=str(tmp_path)).err) == "cold"
        (server,) = [one.pid for one in proc.every() if f"{os.environ['PHALANX_HOME']}/warm/" in proc.command(one.pid)]
        os.kill(server, signal.SIGSTOP)
        result = phalanx("run", "-g", "2", "--cpu", "main.py", cwd=str(tmp_path))
        assert result.code == 0, result.err
        assert "the warm fork server is not used: it did not answer" in result.err
        assert "1 ended\n" in phalanx("warm", "--stop").out
    assert phalanx("warm", "--list").out == "nothing is warm\n"
    assert way(phalanx("run", "-g", "2", "--cpu", "main.py", cwd=str(tmp_path)).err) == "cold"


@pytest.mark.warmed
def test_two_runs_at_once_from_one_warm_fork_server() -> None:
    jobs = [start("run", "-g", "2", "--cpu", script("sleepy.py"), "--seconds", "1") for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert [way(job.err) for job in jobs] == ["warm", "warm"]


@pytest.mark.smoke
@pytest.mark.warmed
def test_a_warm_start_waits_for_no_import(tmp_path: Path) -> None:
    write(tmp_path, main=IMPORTED.replace("torch._dynamo", "_phalanx_forkserver.store.host"))
    result = python("-c", FIRST_ANSWER, "run", "-g", "1", "--cpu", "main.py", cwd=str(tmp_path))
    assert (result.code, result.out) == (0, "the agent is imported: True\nTrue False\n")
    assert way(result.err) == "warm"


def test_keep_warm_leaves_one_and_it_ends_by_itself(tmp_path: Path) -> None:
    write(tmp_path, main="")
    result = phalanx("run", "-g", "2", "--cpu", "--keep-warm", "1s", "main.py", cwd=str(tmp_path))
    assert way(result.err) == "warm"
    # The kit checks that it ends: a leftover process fails the test.


def test_a_stale_warm_fork_server_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, main="", extra="")
    env = {"PYTHONPATH": str(tmp_path)}

    def used(module: str = "extra", **variables: str) -> tuple[str, bool]:
        """Return how it starts, and whether it prints that the warm fork server is not used."""
        words = ("run", "-g", "2", "--cpu", "--preload", module, "main.py")
        result = phalanx(*words, cwd=str(tmp_path), env={**env, **variables})
        return way(result.err), "the warm fork server is not used" in result.err

    with warm("--preload", "extra", env=env):
        assert used() == ("warm", False)
        assert used(OMP_NUM_THREADS="2") == ("cold", False)
        assert used("wave") == ("cold", True)
        assert used() == ("warm", False)
        write(tmp_path, extra="# edited")
        assert used() == ("cold", True)


@pytest.mark.smoke
@pytest.mark.warmed
def test_the_socket_is_for_this_user_alone() -> None:
    (socket,) = Path(os.environ["PHALANX_HOME"], "warm").glob("*.sock")
    assert socket.stat().st_mode & 0o777 == 0o600
    assert socket.parent.stat().st_mode & 0o777 == 0o700


# -- explain


@pytest.mark.smoke
@pytest.mark.warmed
def test_explain_says_what_run_does(tmp_path: Path) -> None:
    write(tmp_path, main="import os, json; print(json.dumps(dict(os.environ)))")
    asked = ("-g", "2", "--cpu", "--master-port", "29650", "--role", "r", "--env", "A=b", "main.py", "--lr", "1")
    explained = json.loads(phalanx("plan", "--json", *asked, cwd=str(tmp_path)).out)
    result = phalanx("run", *asked, cwd=str(tmp_path))
    real = {rank: json.loads(line) for rank, line in re.findall(r"\[(\d)\] (\{.*)", result.out)}
    assert explained["world_size"] == len(real) == 2
    ours = {"PHALANX_RUN_FOLDER", "PHALANX_RUN", "PHALANX_AGENT", "PHALANX_MEMORY"}
    unknown_yet = {"TORCHELASTIC_ERROR_FILE", *ours}
    for rank in explained["ranks"]:
        foreseen = {**explained["environment"], **rank["environment"]}
        seen = real[str(rank["rank"])]
        assert {k: v for k, v in foreseen.items() if k not in unknown_yet} == {
            k: seen[k] for k in foreseen if k not in unknown_yet
        }
        assert unknown_yet <= foreseen.keys()
    assert explained["torchrun"].endswith("main.py --lr 1")
    assert "--nproc-per-node 2" in explained["torchrun"]


@pytest.mark.smoke
def test_explain_starts_nothing_and_is_readable(tmp_path: Path) -> None:
    write(tmp_path, main="")
    result = phalanx("plan", "-g", "3", "--cpu", "main.py", cwd=str(tmp_path))
    assert result.code == 0
    assert "torchrun --nproc-per-node 3 --standalone main.py" in result.out
    assert "OMP_NUM_THREADS=1" in result.out
    assert not Path(os.environ["PHALANX_HOME"]).exists()
