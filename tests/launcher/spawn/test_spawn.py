"""phalanx.spawn: results, first causes, and no leftovers. The kit's fixture checks that after each test.

torch is imported here once, not by the fork server of every test; scripts about other things do not import it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import LaunchError, RankError, UsageError
from phalanx.launcher.function_call import WithRun, with_run
from phalanx.launcher.spawn import spawn as module
from phalanx.launcher.spawn import stacks
from phalanx.launcher.spawn.output import RankOutput
from tests.kit.cli import alive

# Most tests are about processes, and need no group.
spawn = partial(module.spawn, join=False)


def rank() -> int:
    return int(os.environ["RANK"])


def test_results_come_in_the_order_of_ranks() -> None:
    def place() -> tuple[str, ...]:
        time.sleep(0.05 * (2 - rank()))  # the last one ends first
        return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    assert spawn(place, 3) == [("0", "3", "0", "3"), ("1", "3", "1", "3"), ("2", "3", "2", "3")]
    assert "RANK" not in os.environ


def test_a_lambda_and_what_it_closes_over() -> None:
    offset = {"by": 5}
    assert spawn(lambda a, *, b: a + b + offset["by"] + rank(), 2, args=(1,), kwargs={"b": 10}) == [16, 17]


def test_what_the_user_has_set_is_set_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except variables that mark this process as a rank of another run."""
    for name in ("PHALANX_CHECKPOINTS", "PHALANX_RUN", "PHALANX_TOPOLOGY", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.setenv(name, "x")
    found = spawn(lambda: {name for name, value in os.environ.items() if value == "x"}, 1)
    assert found == [{"PHALANX_CHECKPOINTS"}]


def test_the_group_forms_inside() -> None:
    def total() -> float:
        dist.init_process_group("gloo")
        tensor = torch.tensor([rank() + 1.0])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor)

    assert spawn(total, 3) == [6.0] * 3


def test_the_group_is_made_for_those_who_ask() -> None:
    def gathered() -> list[int]:
        found: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(found, rank() * 10)
        return found

    assert spawn(gathered, 2, backend="gloo") == [[0, 10]] * 2
    assert module.spawn(gathered, 2) == [[0, 10]] * 2  # joined without a call


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_ranks_are_joined_by_default(fresh: bool) -> None:
    assert module.spawn(adopted, 2, fresh=fresh) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert module.spawn(dist.is_initialized, 1, fresh=fresh, join=False) == [False]


def adopted() -> tuple[int, int, float]:
    """`phalanx.init` uses the existing group."""
    import phalanx

    group = phalanx.init()
    return group.rank, group.world_size, group.sum(group.rank)


def test_after_torch_has_used_threads() -> None:
    """A fork from the thread that has used torch's pool would hang in the first parallel loop."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(4_000_000).exp().sum()

        def work() -> int:
            torch.set_num_threads(2)
            torch.ones(4_000_000).exp().sum()
            return torch.get_num_threads()

        assert spawn(work, 2, timeout=240, fresh=False) == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_a_tensor_larger_than_a_pipe() -> None:
    found = spawn(lambda: torch.full((1_000_000,), float(rank())), 2)
    assert [float(tensor.sum()) for tensor in found] == [0.0, 1_000_000.0]


def test_ranks_draw_different_numbers() -> None:
    torch.manual_seed(0)
    one, other = spawn(lambda: float(torch.rand(1)), 2)
    assert one != other


def test_an_exception_is_raised_with_its_rank_and_traceback() -> None:
    def fail() -> None:
        if rank() == 2:
            raise ValueError("a broken sample")
        time.sleep(1000)

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 4: ValueError: a broken sample") as caught:
        spawn(fail, 4)
    assert time.monotonic() - begin < 200  # and not the 1,000 s of the others
    assert caught.value.rank == 2
    assert 'raise ValueError("a broken sample")' in caught.value.traceback
    assert "spawn_server.py" not in caught.value.traceback
    assert isinstance(caught.value.exception, ValueError)
    assert caught.value.__cause__ is None  # it is shown once
    place = f"  {__file__}:{fail.__code__.co_firstlineno + 2} in fail"
    assert str(caught.value).splitlines()[1:] == [place, '      raise ValueError("a broken sample")']


def test_the_hint_of_python_is_part_of_the_error() -> None:
    with pytest.raises(RankError, match=r"AttributeError: .* has no attribute 'sleap'. Did you mean: 'sleep'\?"):
        spawn(lambda: time.sleap(1), 1)  # type: ignore[attr-defined]


def test_ranks_do_not_show_exceptions_as_a_notebook_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its hook sends messages, and lacks Python's hints."""
    called = tmp_path / "called"
    monkeypatch.setattr(sys, "excepthook", lambda *_: called.touch())
    with pytest.raises(RankError, match=r"Did you mean: 'sleep'\?"):
        spawn(lambda: time.sleap(1), 2)  # type: ignore[attr-defined]
    assert not called.exists()


def test_a_training_function_gets_its_run() -> None:
    def train(run: phalanx.Run, factor: int, *, more: int = 0) -> int:
        return factor * run.group.sum(run.rank) + more

    assert spawn(train, 3, args=(10,), kwargs={"more": 1}) == [31, 31, 31]

    def fail(run: phalanx.Run) -> None:
        run.backward(1.0)

    with pytest.raises(RankError, match=r"^rank \d of 2: UsageError: backward\(\) was given a float") as caught:
        spawn(fail, 2)
    lines = str(caught.value).splitlines()
    assert f"  {__file__}:{fail.__code__.co_firstlineno + 1} in fail" in lines
    assert re.fullmatch(r"  afterwards: rank \d failed in the same way", lines[-1]), lines


@pytest.mark.parametrize(
    ("args", "kwargs", "gets_run"),
    [((), {}, True), ((3,), {}, True), ((3, 4), {}, False), ((), {"run": 3}, False), ((), {"lr": 4}, True)],
)
def test_which_function_gets_a_run(args: tuple[int, ...], kwargs: dict[str, int], gets_run: bool) -> None:
    def train(run, lr=1):  # type: ignore[no-untyped-def]
        pass

    def typed(job: phalanx.Run, lr: int = 1) -> None: ...

    def other(run: str, lr: int = 1) -> None: ...

    assert isinstance(with_run(train, args, kwargs), WithRun) is gets_run
    same = {"job" if name == "run" else name: value for name, value in kwargs.items()}
    assert isinstance(with_run(typed, args, same), WithRun) is gets_run
    assert with_run(other, args, kwargs) is other


def test_who_lost_a_peer_is_not_the_first_cause() -> None:
    def lose() -> None:
        dist.all_reduce(torch.ones(1))
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="rank 1 of 3: killed by SIGKILL"):
        spawn(lose, 3, backend="gloo")


@pytest.mark.parametrize(
    ("leave", "words"), [(lambda: sys.exit(3), "SystemExit: 3"), (lambda: os._exit(4), "ended with exit code 4")]
)
def test_an_early_exit(leave: object, words: str) -> None:
    with pytest.raises(RankError, match=f"rank [01] of 2: {words}"):
        spawn(leave, 2)  # type: ignore[arg-type]


def test_who_goes_without_a_word_ends_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ended with exit code 0 and no result"):
        spawn(lambda: os._exit(0) if rank() else time.sleep(1000), 2)


def test_the_message_of_main_is_the_cause() -> None:
    import phalanx

    def train(run: phalanx.Run) -> None:
        raise UsageError("a learning rate of zero", fix="lr=0.1")

    with pytest.raises(RankError, match="rank 0 of 1: UsageError: a learning rate of zero"):
        spawn(phalanx.main, 1, args=(train,))


def test_a_polite_exit_is_no_failure() -> None:
    assert spawn(lambda: sys.exit(0), 2) == [None, None]


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(RankError, match=r"its result, a builtins\.generator, cannot be sent back") as caught:
        spawn(lambda: (number for number in range(3)), 2)
    assert "return what pickle can take" in str(caught.value)


def test_output_comes_with_the_rank_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print(f"one\ntwo of {rank()}", flush=True)
        print("no newline", end="")
        os.system("echo from below")
        print("aside", file=sys.stderr)

    spawn(talk, 2)
    shown = capsys.readouterr()
    for number in (0, 1):
        output = [line for line in shown.out.splitlines() if line.startswith(f"[{number}] ")]
        assert output[:2] == [f"[{number}] one", f"[{number}] two of {number}"]
        assert "from below" in "".join(output)
        assert "no newline" in "".join(output)
    assert sorted(shown.err.splitlines()) == ["[0] aside", "[1] aside"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_of_rank_0_is_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    shown = RankOutput(2)
    shown.show(b"\r 10%|#   |", 0, 1)
    assert err.getvalue() == "\r[0]  10%|#   |"
    shown.show(b"a line\n", 1, 0)  # the bar is removed meanwhile
    assert out.getvalue() == "[1] a line\n"
    assert err.getvalue().endswith("\r" + " " * 14 + "\r" + "\r[0]  10%|#   |")
    shown.show(b"\r 20%|##  |\x1b[K", 0, 1)
    shown.show(b"train.py:3: UserWarning: careful\n", 0, 1)  # of the rank that draws the bar
    assert err.getvalue().endswith("\r" + " " * 14 + "\r" + "[0] train.py:3: UserWarning: careful\n")
    shown.show(b"\r 30%|### |\x1b[K", 0, 1)
    assert err.getvalue().endswith("careful\n\r[0]  30%|### |")
    shown.show(b"\rdone\x1b[K\n", 0, 1)
    assert err.getvalue().endswith("\r[0] done\n")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown.show(b"\r 10%|#   |", 0, 1)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    shown.finish()
    assert sys.stderr.getvalue() == "[0]  10%|#   |\n"  # type: ignore[attr-defined]


def test_more_output_than_a_pipe_holds(capsys: pytest.CaptureFixture[str]) -> None:
    spawn(lambda: [print("x" * 99) for _ in range(5000)] and None, 2)
    assert capsys.readouterr().out.count("x" * 99 + "\n") == 10_000


def late() -> None:
    if rank() == 1:
        time.sleep(1000)
    torch.distributed.barrier()


def test_a_timeout_names_who_was_late_and_where() -> None:
    with pytest.raises(LaunchError) as raised:
        module.spawn(late, 3, timeout=20)
    assert raised.value.what == "ranks 0-2 of 3 had not ended after 20 s, and were stopped"
    verdict, *places = raised.value.details
    assert "rank 1 is sleeping at test_spawn.py" in verdict
    assert "the other 2 wait for it" in verdict
    first = late.__code__.co_firstlineno
    assert f"rank 1 is at test_spawn.py:{first + 2} in late: time.sleep(1000)" in places
    assert f"ranks 0, 2 are at test_spawn.py:{first + 3} in late: torch.distributed.barrier()" in places


def test_a_deep_import_hides_the_line_of_the_script() -> None:
    """faulthandler writes the innermost 100 frames only."""
    depth = [
        '  File "/v/lib/python3.11/site-packages/torch/_order.py", line 12 in <module>',
        *['  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed'] * 99,
    ]
    stack = stacks.parse("\n".join(["Current thread 0x00007f (most recent call first):", *depth, "  ...", ""]))
    assert stacks.verdict({1: stack}, 2, 5.0) == ["rank 1 is importing modules"]


def test_a_rank_may_spawn() -> None:
    assert spawn(lambda: spawn(lambda: os.environ["WORLD_SIZE"], 3), 2) == [["3"] * 3] * 2


def test_what_a_rank_has_started_ends_with_it() -> None:
    pids = spawn(lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, 2)
    assert not any(map(alive, pids))


def test_shared_memory_of_a_killed_rank_is_removed() -> None:
    def die() -> None:
        torch.multiprocessing.set_sharing_strategy("file_system")
        held = torch.ones(1000).share_memory_()
        assert any(name.startswith(f"torch_{os.getpid()}_") for name in os.listdir("/dev/shm"))
        if held.is_shared():
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="killed by SIGKILL"):
        spawn(die, 1)
    # and the fixture finds no file


def test_exit_functions_are_the_ranks_own(tmp_path: Path) -> None:
    def note() -> None:
        import atexit

        atexit.register((tmp_path / f"{rank()}").touch)

    spawn(note, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_init_inside() -> None:
    def total() -> tuple[int, int, float]:
        import phalanx

        group = phalanx.init()
        return group.rank, group.world_size, group.sum(group.rank + 1)

    assert spawn(total, 3, timeout=240) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_beside_a_running_event_loop() -> None:
    """As in a notebook, whose cells run inside one: ranks do not inherit it."""
    import asyncio

    async def inner() -> int:
        await asyncio.sleep(0)
        return rank()

    async def cell() -> list[int]:
        return spawn(lambda: asyncio.run(inner()), 2)

    assert asyncio.run(cell()) == [0, 1]


def test_workers_of_a_data_loader() -> None:
    def total() -> float:
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        return sum(float(batch.sum()) for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=1))

    assert spawn(total, 2, timeout=240) == [28.0, 28.0]


def test_a_manager_of_the_caller() -> None:
    with multiprocessing.Manager() as manager:
        noted = manager.dict()
        spawn(lambda: noted.update({rank(): manager.list([rank()])[0]}), 2)
        assert dict(noted) == {0: 0, 1: 1}


def test_standard_input_of_a_rank_is_empty() -> None:
    assert spawn(lambda: (sys.stdin.read(), os.read(0, 1)), 1) == [("", b"")]


def test_a_process_in_a_group_is_not_forked() -> None:
    def reason() -> str:
        before = module.must_not_fork()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(UsageError, match="cannot be forked: it is in a process group"):
            spawn(rank, 1, fresh=False)
        return before + module.must_not_fork()

    assert spawn(reason, 1) == ["it is in a process group"]


@pytest.mark.parametrize("left", range(3))  # when the pipes of the last rank fail
def test_more_ranks_than_files(left: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 60 + left, hard))
    try:
        with pytest.raises(LaunchError, match="100 ranks need more open files") as caught:
            spawn(rank, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "fix: ulimit -n 7" in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(("fn", "ranks"), [("train", 2), (rank, 0), (rank, "2")])
def test_invalid_arguments_are_refused(fn: object, ranks: object) -> None:
    with pytest.raises(UsageError):
        spawn(fn, ranks)  # type: ignore[arg-type]
