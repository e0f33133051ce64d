"""From failures of processes to the first cause and its report: a table, without a process."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from phalanx.collectives import errors
from phalanx.launcher.output.tracebacks import read_traceback
from phalanx.launcher.runs.failure_report import (
    afterwards,
    block,
    failed_ranks,
    left_alone,
    summary,
    with_afterwards,
)
from phalanx.launcher.runs.root_cause import (
    CleanExit,
    ProcessFailure,
    count,
    first_cause,
    in_words,
    lost,
    permanent,
    raised,
    report_of,
    stopped_by_signal,
)

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14529"
ADVICE = (
    ". This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an "
    "error. GLHF! 🏖️"
)
OURS = "PeerLost: all_reduce: peer lost, rank 1 has ended"


def error(text: str, when: float, trace: str = "", **more: object) -> str:
    message = {"message": text, "extraInfo": {"py_callstack": trace, "timestamp": str(int(when))}}
    return json.dumps({"message": message, "time": when, **more})


DEAD = {
    "one exit": ([ProcessFailure(2, 3, 10.0)], 2),
    "the earlier of two": ([ProcessFailure(0, 1, 11.0), ProcessFailure(1, 1, 10.0)], 1),
    # Rank 1 raised first, and took longer to exit.
    "exception before exit": (
        [ProcessFailure(0, 1, 11.0), ProcessFailure(1, 1, 12.0, error=error("ValueError: x", 10.5))],
        1,
    ),
    # Rank 0 detected the loss of rank 1 before the kernel had reported its exit.
    "a lost peer is no cause": ([ProcessFailure(0, 1, 9.9, error=error(LOST, 9.9)), ProcessFailure(1, -9, 10.0)], 1),
    "nor is one of phalanx's groups": (
        [ProcessFailure(0, 1, 9.9, error=error(OURS, 9.9)), ProcessFailure(1, -9, 10.0)],
        1,
    ),
    "a lost peer if nothing else": ([ProcessFailure(0, 1, 9.9, error=error(LOST, 9.9))], 0),
    "stopped by us": ([ProcessFailure(0, -15, 9.0, stopped=True), ProcessFailure(1, 5, 10.0)], 1),
    "killed by us": ([ProcessFailure(0, -9, 9.0, stopped=True), ProcessFailure(1, 5, 10.0)], 1),
    "handled our SIGTERM": ([ProcessFailure(0, 143, 9.0, stopped=True), ProcessFailure(1, 5, 10.0)], 1),
    "raised, then stopped": (
        [
            ProcessFailure(0, 1, 11.0, error=error("KeyError: 1", 10.9)),
            ProcessFailure(1, -15, 11.1, True, error=error("ValueError: x", 10.5)),
        ],
        1,
    ),
    "terminated from outside": ([ProcessFailure(3, -15, 10.0)], 3),
}


@pytest.mark.parametrize(("deaths", "rank"), DEAD.values(), ids=DEAD.keys())
def test_first_cause(deaths: list[ProcessFailure], rank: int) -> None:
    for order in (deaths, deaths[::-1]):
        found = first_cause(order)
        assert found is not None
        assert found.rank == rank


TIMEOUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
)
BLAME = (
    "rank 2 did not reach all_reduce #3 at train.py:7 within 4 s: it was sleeping at train.py:3",
    "its line: x()",
)


def test_who_made_a_rank_time_out_is_the_cause_and_its_victims_are_not() -> None:
    victim = ProcessFailure(0, 1, 11.0, error=error(TIMEOUT, 10.1), blame=BLAME)
    earlier = ProcessFailure(1, -15, 11.5, True, error=error(TIMEOUT, 10.0), stop_sent=11.1)
    assert first_cause([victim, earlier]) == victim
    text = block(victim, tail=(), folder="x").splitlines()
    assert text[:3] == [BLAME[0], "  its line: x()", f"  rank 0 timed out: {TIMEOUT}"]
    threw = ProcessFailure(2, -15, 12.0, True, error=error("ValueError: x", 9.9), stop_sent=11.1)
    assert first_cause([victim, threw]) == replace(threw, code=1)  # before any rank timed out
    obeyed = replace(threw, error=error("ValueError: interrupted", 11.2))
    assert first_cause([victim, obeyed]) == victim


TRACE = ["Traceback (most recent call last):", '  File "/w/a.py", line 3, in <module>', "ValueError: x"]
COUNTED = {
    "by an exit code": (ProcessFailure(1, 3, 10.0), 1),
    "by a signal": (ProcessFailure(1, -9, 10.0), 1),
    "stopped by us": (ProcessFailure(1, -15, 10.0, True, stop_sent=9.0), 0),
    "ended by itself after a request to stop": (
        ProcessFailure(1, 1, 10.0, True, stop_sent=9.0, error=error("KeyError: 1", 9.5)),
        0,
    ),
    "raised before, and then stopped": (
        ProcessFailure(1, -15, 10.0, True, stop_sent=9.0, error=error("KeyError: 1", 8.9)),
        1,
    ),
    "raised, nobody knows when": (ProcessFailure(1, 1, 10.0, True, stop_sent=9.9, stderr=TRACE), 1),
    "by our signal, after an error that it survived": (
        ProcessFailure(1, -15, 10.0, True, stop_sent=9.9, stderr=TRACE),
        0,
    ),
    "crashed meanwhile": (ProcessFailure(1, -11, 10.0, True, stop_sent=9.9), 1),
}


@pytest.mark.parametrize(("death", "failed"), COUNTED.values(), ids=COUNTED.keys())
def test_those_that_failed_by_themselves_are_counted(death: ProcessFailure, failed: int) -> None:
    assert count([death]) == failed


def test_the_socket_of_a_dataloader_worker_is_no_lost_peer() -> None:
    inside = '  File "/v/site-packages/torch/utils/data/dataloader.py", line 1291, in _try_get_data\n'
    trace = f"Traceback (most recent call last):\n{inside}ConnectionResetError: [Errno 104] Connection reset by peer\n"
    worker = ProcessFailure(0, 1, 10.0, stderr=trace.splitlines())
    assert first_cause([ProcessFailure(1, 1, 9.0, error=error(LOST, 9.0)), worker]) == worker
    assert "a DataLoader worker of this rank died" in block(worker, tail=(), folder="x")


def test_a_port_in_use_is_reported_with_what_to_do() -> None:
    text = (
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )
    assert "port 29500 is in use: leave MASTER_PORT" in block(
        ProcessFailure(0, 1, 9.9, error=error(text, 9.9)), tail=(), folder=""
    )


def test_the_exception_in_a_dataloader_worker_is_that_of_the_failure() -> None:
    loader = '  File "/v/site-packages/torch/_utils.py", line 794, in reraise\n'
    trace = (
        f'Traceback (most recent call last):\n  File "/w/t.py", line 9, in main\n    for x in data:\n{loader}'
        "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/w/data.py", line 8, in __getitem__\n    raise ValueError(name)\nValueError: no such file: 33.jpg\n'
    )
    text = "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback …"
    failed = ProcessFailure(1, 1, 9.9, error=error(text, 9.9, trace=trace))
    shown = block(failed, tail=(), folder="x").splitlines()
    assert shown[0] == summary(failed)
    assert shown[0] == "rank 1 failed: ValueError: no such file: 33.jpg (in DataLoader worker process 0)"
    assert [line for line in shown if "33.jpg" in line] == shown[:1]
    assert shown[-4:-1] == [
        "  where it was raised:",
        "    /w/data.py:8 in __getitem__",
        "        raise ValueError(name)",
    ]


def test_a_cuda_call_of_a_torch_without_cuda_is_explained() -> None:
    text = "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'"
    shown = block(ProcessFailure(0, 1, 9.9, error=error(text, 9.9)), tail=(), folder="")
    assert "this torch is built without CUDA: " in shown
    quoted = text.replace("AttributeError", "ValueError: caught AttributeError")
    assert "built without CUDA" not in block(ProcessFailure(0, 1, 9.9, error=error(quoted, 9.9)), tail=(), folder="")


def test_a_message_of_many_lines_is_cut_before_what_cpp_adds() -> None:
    frames = [["/t.py", 4, "load", "read()"]]
    text = "RuntimeError: " + "\n".join(["a" * 400, "b", "c", "d", "e", "f"])
    lines = block(ProcessFailure(0, 1, 3.0, error=error(text, 2.0, frames=frames)), tail=(), folder="x").splitlines()
    assert lines[0].endswith("a…")
    assert lines[1:6] == ["    b", "    c", "    d", "    e", "    …"]
    text = "RuntimeError: a\nb\nException raised from f at g.cpp:3\nframe #0: h"
    lines = block(ProcessFailure(0, 1, 3.0, error=error(text, 2.0, frames=frames)), tail=(), folder="x").splitlines()
    assert lines[1:3] == ["    b", "  /t.py:4 in load"]


def test_a_crash_is_reported_by_the_dump_of_faulthandler() -> None:
    dump = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00ff (most recent call first):"]
    frames = ['  File "/w/net.py", line 7 in crash', '  File "/w/train.py", line 9 in <module>']
    text = block(ProcessFailure(0, -11, 1.0, stderr=[*dump, *frames]), tail=(), folder="x").splitlines()
    assert text[:4] == [
        "rank 0 failed: Fatal Python error: Segmentation fault",
        "  ended with SIGSEGV (Segmentation fault)",
        "  /w/train.py:9 in <module>",
        "  /w/net.py:7 in crash",
    ]
    assert not any("PYTHONFAULTHANDLER" in line for line in text)
    assert "PYTHONFAULTHANDLER" in block(ProcessFailure(0, -11, 1.0), tail=(), folder="x")


def test_a_rank_that_exited_early_is_to_blame_and_not_the_one_that_lost_it() -> None:
    lost = ProcessFailure(0, 1, 9.9, error=error(LOST, 9.9))
    blamed = replace(lost, blame=left_alone(lost, [CleanExit(2, 9.0, True), CleanExit(3, 9.0)]))
    assert summary(blamed) == "ranks 2, 3 exited, with exit code 0, while rank 0 still needed them"
    text = block(blamed, tail=(), folder="x").splitlines()
    assert text[0] == summary(blamed)
    assert "sys.exit() on some ranks only?" in text[1]
    advised = replace(blamed, error=error(LOST.replace("[gloo", "[/__w/third_party/gloo/gloo") + ADVICE, 9.9))
    message = "  rank 0 lost the peer: RuntimeError: Connection closed by peer [127.0.0.1]:14529"
    assert block(advised, tail=(), folder="x").splitlines()[2] == message  # the peer has not crashed
    assert text[2].startswith("  rank 0 lost the peer: ")
    assert left_alone(lost, []) == []
    assert left_alone(lost, [CleanExit(2, 10.0)]) == [], "it exited later"
    assert left_alone(ProcessFailure(0, 1, 9.9, error=error("ValueError: x", 9.9)), [CleanExit(2, 9.0, True)]) == []
    named = ProcessFailure(0, 1, 9.9, error=error(OURS.format("rank 1 has"), 9.9))
    alone = "rank 1 exited in the middle of the training, with exit code 0, while rank 0 still needed it"
    assert left_alone(named, [CleanExit(1, 9.0, True), CleanExit(2, 9.0)])[0] == alone
    assert left_alone(named, [CleanExit(2, 9.0, True)]) == []
    ended = "PeerLost: rank 1 has ended the training, and the other ranks have not: rank 0 all_reduce, rank 1 barrier"
    assert left_alone(ProcessFailure(0, 1, 9.9, error=error(ended, 9.9)), [CleanExit(1, 9.0, True)])[0] == alone


OURS = "PeerLost: all_reduce: peer lost, {} ended"


@pytest.mark.parametrize(
    ("who", "ranks"),
    [("rank 2 has", {2}), ("ranks 1, 2 and 13 have", {1, 2, 13}), ("rank 6 (of this group: 2) has", {6})],
)
def test_lost_peers_are_read_from_our_own_errors(who: str, ranks: set[int]) -> None:
    death = ProcessFailure(0, 1, 9.9, error=error(OURS.format(who), 9.9))
    assert lost(death) == ranks
    found = first_cause([death, ProcessFailure(6, -9, 10.0)])
    assert found is not None
    assert found.rank == 6


def test_ranks_that_differ_are_reported_with_their_lines() -> None:
    text = "ranks called different things: rank 0 all_reduce of 4 float32 (SUM), rank 1 barrier"
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 3, in <module>',
        f"phalanx.collectives.errors.CollectiveMismatch: {text}",
    ]
    assert read_traceback(trace).frames
    placed = read_traceback([*trace, "  rank 0: x.py:3", "      dist.all_reduce(x)", "[rank0]: more"])
    assert placed.exception == f"CollectiveMismatch: {text}\n  rank 0: x.py:3\n      dist.all_reduce(x)"
    assert not placed.frames


def test_sizes_that_do_not_fit() -> None:
    message = (
        "  what(): 24 vs 20. Received data size doesn't match expected size. Is there a distributed collective "
        "mismatch in your code?"
    )
    assert "--check-collectives shows where" in block(ProcessFailure(3, -6, 9.9, stderr=[message]), tail=(), folder="x")


def test_no_rank_failed_by_itself() -> None:
    assert first_cause([]) is None
    assert first_cause([ProcessFailure(0, -15, 1.0, stopped=True)]) is None


def test_an_exception_that_was_cut_short_by_our_stop_ends_as_an_exception() -> None:
    found = first_cause([ProcessFailure(1, -15, 11.1, True, error=error("ValueError: x", 10.5))])
    assert found is not None
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("code", "words", "shell"),
    [
        (3, "exit code 3", 3),
        (-9, "SIGKILL (Killed)", 137),
        (-11, "SIGSEGV (Segmentation fault)", 139),
        (-40, "signal 40", 168),
    ],
)
def test_codes_in_words(code: int, words: str, shell: int) -> None:
    assert in_words(code) == words
    assert ProcessFailure(0, code, 0.0).exit_code == shell


def test_a_mismatch_of_collectives_is_reported_with_both_places_whatever_torch_puts_before_its_lines() -> None:
    mismatch = [
        "rank 1 called broadcast where rank 0 called all_reduce (collective 6 of all ranks)",
        "  rank 1: broadcast(float32 [10], root 0) at train.py:8",
        "      dist.broadcast(x, 0)",
        "  rank 0: all_reduce(float32 [10], SUM) at train.py:10",
        "      dist.all_reduce(x)",
    ]
    trace = ["Traceback (most recent call last):", '  File "train.py", line 8, in <module>', "    dist.broadcast(x, 0)"]
    lines = [*trace, f"phalanx.CollectiveMismatchError: {mismatch[0]}", *mismatch[1:]]
    death = ProcessFailure(1, 1, 3.0, stderr=[*(f"[rank1]: {line}" for line in lines), "something else"])
    text = block(death, tail=[], folder="/runs/x/1")
    assert text.splitlines()[:5] == [f"rank 1 failed: CollectiveMismatchError: {mismatch[0]}", *mismatch[1:]]


def test_the_block_has_all_that_is_known() -> None:
    death = ProcessFailure(
        5,
        1,
        3.0,
        device="gpu 2",
        error=error("OSError: disk\nsecond line", 2.0, frames=[["/t.py", 4, "load", "read()"]]),
    )
    text = with_afterwards(block(death, tail=["epoch 1"], folder="/runs/x/5"), ["afterwards: rank 1 lost the peer"])
    assert text.splitlines() == [
        "rank 5 (gpu 2) failed: OSError: disk",
        "    second line",
        "  /t.py:4 in load",
        "      read()",
        "  its last lines:",
        "    epoch 1",
        "  afterwards: rank 1 lost the peer",
        "  all of its output: /runs/x/5",
    ]


def test_a_kill_is_explained_where_the_kernel_tells() -> None:
    shown = block(ProcessFailure(0, -signal.SIGKILL, 1.0, memory="the kernel killed it"), tail=[], folder="f")
    assert shown.splitlines()[0] == "rank 0 failed: SIGKILL (Killed), the kernel killed it"
    assert "killed from outside" not in shown
    unexplained = block(ProcessFailure(0, -signal.SIGKILL, 1.0, stderr=["last words"]), tail=[], folder="f")
    assert "killed from outside" in unexplained
    assert "    last words" in unexplained
    assert report_of(ProcessFailure(0, 1, 1.0)).exception == ""


def traced(text: str, *files: str, when: float = 2.0, **more: object) -> str:
    """Return the error file of an exception with these frames, outermost first."""
    frames = "".join(f'  File "{file}", line {n}, in f{n}\n    call{n}()\n' for n, file in enumerate(files, 1))
    stack = f"Traceback (most recent call last):\n{frames}{text}\n"
    message = {"message": text, "extraInfo": {"py_callstack": stack, "timestamp": "2"}}
    return json.dumps({"message": message, "time": when, "exception": text.split(":", maxsplit=1)[0], **more})


TORCH = "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py"


def test_the_frames_of_the_script_are_shown_and_those_of_libraries_folded() -> None:
    failure = ProcessFailure(0, 1, 3.0, error=traced("ValueError: x", TORCH, "/w/a.py", TORCH, TORCH, "/w/b.py", TORCH))
    assert block(failure, tail=(), folder="x").splitlines() == [
        "rank 0 failed: ValueError: x",
        "  /w/a.py:2 in f2",
        "      call2()",
        "  … 2 frames, the last torch/nn/modules/linear.py:4 in f4",
        "  /w/b.py:5 in f5",
        "      call5()",
        "  … torch/nn/modules/linear.py:6 in f6",
        "  all of its output: x",
    ]
    brief = block(failure, tail=(), folder="x", brief=True)
    assert brief.splitlines() == ["rank 0 failed: ValueError: x", "  all of its output: x"]


def test_a_recursion_is_not_shown_in_full() -> None:
    deep = ProcessFailure(0, 1, 3.0, error=traced("RecursionError: deep", *["/w/a.py"] * 900))
    assert len(block(deep, tail=(), folder="x").splitlines()) < 30


def test_failures_of_other_ranks_are_reported_in_one_line_per_kind() -> None:
    cause = ProcessFailure(1, 1, 3.0, error=traced("ValueError: x", "/w/a.py"))
    deaths = [
        cause,
        *(ProcessFailure(rank, 1, 3.1, error=error(LOST, 3.1)) for rank in (0, 2, 3, 4)),
        ProcessFailure(5, 1, 3.1, error=traced("ValueError: x", "/w/a.py", when=3.0)),
        ProcessFailure(6, 1, 3.1, error=traced("KeyError: 1", "/w/a.py", when=3.0)),
        ProcessFailure(7, -15, 3.2, stopped=True),
        ProcessFailure(8, 9, 3.2),
    ]
    assert afterwards(cause, failed_ranks(deaths)) == [
        "afterwards: rank 5 failed in the same way",
        "afterwards: rank 6 failed: KeyError: 1",
        "afterwards: rank 8 failed: exit code 9",
        "afterwards: ranks 0, 2-4 lost the peer",
    ]
    assert afterwards(cause, failed_ranks([cause])) == []


def test_a_mismatch_in_a_callback_of_ddp_is_named_as_on_the_other_ranks() -> None:
    words = "ranks called different things: rank 0 all_gather of 1 int64, ranks 1 and 2 all_reduce of 9 float32 (SUM)"
    wrapped = (
        "RuntimeError: Got the following error when running the callback: CollectiveMismatch: "
        f"all_reduce: this group has failed before: {words}"
    )
    cause = ProcessFailure(1, 1, 3.0, error=traced(wrapped, "/w/a.py"))
    other = ProcessFailure(0, 1, 3.1, error=traced(words, "/w/b.py", "/w/c.py", when=3.0))
    assert summary(cause) == f"rank 1 failed: {words}"
    assert afterwards(cause, failed_ranks([cause, other])) == ["afterwards: rank 0 failed in the same way"]


def test_an_error_of_a_hook_of_ddp_keeps_its_class() -> None:
    wrapped = "RuntimeError: Got the following error when running the callback: ValueError: my hook: fails"
    cause = ProcessFailure(1, 1, 3.0, error=traced(wrapped, "/w/a.py"))
    assert summary(cause) == "rank 1 failed: ValueError: my hook: fails"


def test_ddps_words_are_left_out_for_all_errors_of_collectives() -> None:
    found = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    assert len(found) == 6
    for name in {*found} - {"CallRefused"}:  # raised by the call itself
        wrapped = f"RuntimeError: Got the following error when running the callback: {name}: it is over"
        cause = ProcessFailure(1, 1, 3.0, error=traced(wrapped, "/w/a.py"))
        assert summary(cause) == "rank 1 failed: it is over"


def test_different_errors_without_a_message_are_not_the_same() -> None:
    cause = ProcessFailure(0, 1, 3.0, error=traced("AssertionError", "/w/a.py"))
    other = ProcessFailure(1, 1, 3.1, error=traced("AssertionError", "/w/b.py", "/w/c.py", when=3.0))
    assert afterwards(cause, failed_ranks([cause, other])) == ["afterwards: rank 1 failed: AssertionError"]


def test_failures_that_are_all_different_are_counted() -> None:
    cause = ProcessFailure(0, 1, 3.0, error=traced("ValueError: x", "/w/a.py"))
    others = [ProcessFailure(rank, 1, 3.1, error=traced(f"Error{rank}: y", "/w/a.py")) for rank in range(1, 100)]
    kinds = failed_ranks([cause, *others])
    assert len(kinds) < 20
    assert sorted(rank for kind in kinds for rank in kind.ranks) == list(range(100))
    lines = afterwards(cause, kinds)
    assert len(lines) == 5
    assert lines[0] == "afterwards: rank 1 failed: Error1: y"
    assert lines[-1] == "afterwards: 95 more failed in other ways"


def test_where_a_script_called_exit() -> None:
    called = traced("sys.exit(3)", "/w/a.py", "/w/b.py", exception="SystemExit", code=3)
    assert block(ProcessFailure(0, 3, 3.0, error=called), tail=(), folder="x").splitlines() == [
        "rank 0 failed: sys.exit(3)",
        "  /w/a.py:1 in f1",
        "      call1()",
        "  /w/b.py:2 in f2",
        "      call2()",
        "  all of its output: x",
    ]
    # It caught the SystemExit, and something else ended it.
    assert block(ProcessFailure(0, -11, 3.0, error=called), tail=(), folder="x").startswith("rank 0 failed: SIGSEGV")


def test_a_usage_error_is_reported_with_the_usage() -> None:
    library = "/usr/lib/python3.11/argparse.py"
    text = "usage error: a.py: error: the following arguments are required: --lr"
    called = traced(text, "/w/a.py", library, library, exception="SystemExit", code=2)
    stderr = ["usage: a.py [-h] --lr LR", "            [--epochs N]", "a.py: error: …"]
    failure = ProcessFailure(0, 2, 3.0, error=called, stderr=stderr)
    brief = block(failure, tail=(), folder="x", brief=True)  # one rank, whose output is shown
    assert brief.splitlines() == [f"rank 0 failed: {text}", "  all of its output: x"]
    assert block(failure, tail=(), folder="x").splitlines() == [
        f"rank 0 failed: {text}",
        "    usage: a.py [-h] --lr LR",
        "                [--epochs N]",
        "  /w/a.py:1 in f1",
        "      call1()",
        "  all of its output: x",
    ]


@pytest.mark.parametrize(
    ("text", "is_permanent", "is_raised"),
    [
        ("ModuleNotFoundError: No module named 'x'", True, True),
        ("SyntaxError: invalid syntax", True, True),
        ("NameError: name 'x' is not defined", True, True),
        ("OptionError: precision=x", True, True),
        ("AttributeError: Run has no 'wrapp'. Did you mean: 'wrap'?", True, True),
        ("AttributeError: 'NoneType' object has no attribute 'shape'", False, True),
        ("AttributeError: 'int' object has no attribute 'backward'", False, True),  # sum([]) of an empty batch
        ("TypeError: DataRun.loader() got an unexpected keyword argument 'last'", True, True),
        ("TypeError: Run.step() missing 1 required positional argument: 'opt'", True, True),
        ("TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'", False, True),
        ("ValueError: x", False, True),
        (LOST, False, False),
        (TIMEOUT, False, False),
    ],
)
def test_whether_another_try_can_succeed(text: str, is_permanent: bool, is_raised: bool) -> None:
    failure = ProcessFailure(0, 1, 3.0, error=traced(text, "/w/a.py"))
    assert (permanent(failure), raised(failure)) == (is_permanent, is_raised)
    assert not raised(ProcessFailure(0, 7, 3.0))


def test_a_wrong_call_inside_a_library_may_succeed_later() -> None:
    text = "AttributeError: 'Linear' object has no attribute 'weights'"
    assert not permanent(ProcessFailure(0, 1, 3.0, error=traced(text, "/w/a.py", TORCH)))
    for name in ("__getattr__", "__setattr__"):
        frames = f'  File "/w/a.py", line 1, in f\n  File "{TORCH}", line 2, in {name}\n'
        stack = f"Traceback (most recent call last):\n{frames}{text}\n"
        message = {"message": text, "extraInfo": {"py_callstack": stack, "timestamp": "2"}}
        failure = ProcessFailure(0, 1, 3.0, error=json.dumps({"message": message, "exception": "AttributeError"}))
        assert permanent(failure)
        assert block(failure, tail=(), folder="x").splitlines()[1:-1] == ["  /w/a.py:1 in f"]


def test_what_follows_ctrl_c_is_not_reported() -> None:
    assert stopped_by_signal("Traceback (most recent call last):\n  …\nKeyboardInterrupt\n")
    in_c = "RuntimeError: Cannot extract tensors from value: KeyboardInterrupt: <EMPTY MESSAGE>\n\nAt:\n  a.py(3): f\n"
    assert stopped_by_signal(f"Traceback (most recent call last):\n  …\n{in_c}\n")
    assert not stopped_by_signal(
        f"Traceback …\n  …\n{in_c}\nDuring handling …\n\nTraceback …\n  …\nOSError: disk full\n"
    )
    assert stopped_by_signal(f"Traceback (most recent call last):\n  …\n{LOST}\n")
    assert not stopped_by_signal("KeyboardInterrupt\n\nDuring handling …\n\nTraceback …\n  …\nOSError: disk full\n")
