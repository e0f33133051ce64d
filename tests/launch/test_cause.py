"""From what is known of the dead to the first cause and its words: a table, without a process."""

from __future__ import annotations

import json
import signal

import pytest

from phalanx.launch.cause import Death, block, first_cause, in_words, lost, read_error_file, read_traceback, report_of

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14529"
OURS = "PeerLost: all_reduce: peer lost, rank 1 has ended"


def error(text: str, when: float, **more: object) -> str:
    message = {"message": text, "extraInfo": {"py_callstack": "", "timestamp": str(int(when))}}
    return json.dumps({"message": message, "time": when, **more})


DEAD = {
    "one exit": ([Death(2, 3, 10.0)], 2),
    "the earlier of two": ([Death(0, 1, 11.0), Death(1, 1, 10.0)], 1),
    # Rank 1 raised first, and took longer to be gone.
    "exception before exit": ([Death(0, 1, 11.0), Death(1, 1, 12.0, error=error("ValueError: x", 10.5))], 1),
    # Rank 0 noticed that rank 1 was gone before the kernel had told us of rank 1.
    "a lost peer is no cause": ([Death(0, 1, 9.9, error=error(LOST, 9.9)), Death(1, -9, 10.0)], 1),
    "nor is one of our own groups": ([Death(0, 1, 9.9, error=error(OURS, 9.9)), Death(1, -9, 10.0)], 1),
    "a lost peer if nothing else": ([Death(0, 1, 9.9, error=error(LOST, 9.9))], 0),
    "stopped by us": ([Death(0, -15, 9.0, stopped=True), Death(1, 5, 10.0)], 1),
    "killed by us": ([Death(0, -9, 9.0, stopped=True), Death(1, 5, 10.0)], 1),
    "handled our SIGTERM": ([Death(0, 143, 9.0, stopped=True), Death(1, 5, 10.0)], 1),
    "raised, then stopped": (
        [
            Death(0, 1, 11.0, error=error("KeyError: 1", 10.9)),
            Death(1, -15, 11.1, True, error=error("ValueError: x", 10.5)),
        ],
        1,
    ),
    "terminated from outside": ([Death(3, -15, 10.0)], 3),
}


@pytest.mark.parametrize(("deaths", "rank"), DEAD.values(), ids=DEAD.keys())
def test_first_cause(deaths: list[Death], rank: int) -> None:
    for order in (deaths, deaths[::-1]):
        found = first_cause(order)
        assert found is not None
        assert found.rank == rank


def test_who_had_left_is_told_to_those_who_lost_a_peer() -> None:
    lost = Death(0, 1, 9.9, error=error(LOST, 9.9))
    assert "rank 2 had ended by then, without an error" in block(lost, tail=(), folder="x", left=[2])
    assert "had ended" not in block(lost, tail=(), folder="x")
    assert "had ended" not in block(Death(0, 1, 9.9, error=error("ValueError: x", 9.9)), tail=(), folder="x", left=[2])


OURS = "PeerLost: all_reduce: peer lost, {} ended"


@pytest.mark.parametrize(
    ("who", "ranks"),
    [("rank 2 has", {2}), ("ranks 1, 2 and 13 have", {1, 2, 13}), ("rank 6 (of this group: 2) has", {6})],
)
def test_whom_our_own_groups_have_lost(who: str, ranks: set[int]) -> None:
    death = Death(0, 1, 9.9, error=error(OURS.format(who), 9.9))
    assert lost(death) == ranks
    found = first_cause([death, Death(6, -9, 10.0)])
    assert found is not None
    assert found.rank == 6


def test_ranks_that_differ_are_told_with_their_lines() -> None:
    text = "ranks called different things: rank 0 all_reduce of 4 float32 (SUM), rank 1 barrier"
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 3, in <module>',
        f"phalanx.collectives.trouble.Mismatched: {text}",
    ]
    assert read_traceback(trace).frames
    placed = read_traceback([*trace, "  rank 0: x.py:3", "      dist.all_reduce(x)", "[rank0]: more"])
    assert placed.exception == f"Mismatched: {text}\n  rank 0: x.py:3\n      dist.all_reduce(x)"
    assert not placed.frames


def test_sizes_that_do_not_fit() -> None:
    said = (
        "  what(): 24 vs 20. Received data size doesn't match expected size. Is there a distributed collective "
        "mismatch in your code?"
    )
    assert "--check-collectives shows where" in block(Death(3, -6, 9.9, stderr=[said]), tail=(), folder="x")


def test_nobody_failed_by_itself() -> None:
    assert first_cause([]) is None
    assert first_cause([Death(0, -15, 1.0, stopped=True)]) is None


def test_an_exception_that_was_cut_short_by_our_stop_ends_as_an_exception() -> None:
    found = first_cause([Death(1, -15, 11.1, True, error=error("ValueError: x", 10.5))])
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
    assert Death(0, code, 0.0).exit_code == shell


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"message": {}}', '{"message": {"message": 1, "extraInfo": 2}}'])
def test_an_error_file_of_any_shape_is_survived(text: str) -> None:
    assert read_error_file(text).frames == ()


def test_the_error_file_of_torchs_record() -> None:
    stack = 'Traceback (most recent call last):\n  File "/a/t.py", line 3, in f\n    g(1)\nValueError: no\n'
    record = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": stack, "timestamp": "17"}}}
    report = read_error_file(json.dumps(record))
    assert (report.exception, report.when, report.frames) == ("ValueError: no", 17.0, (("/a/t.py", 3, "f", "g(1)"),))


def test_the_last_traceback_of_stderr() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "old.py", line 1, in <module>',
        "KeyError: 1",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "/x/new.py", line 7, in run',
        "    step(batch)",
        "    ^^^^^^^^^^^",
        "a.b.Trouble: it went wrong",
        "then something else was printed",
    ]
    report = read_traceback(lines)
    assert report.exception == "a.b.Trouble: it went wrong"
    assert report.frames == (("/x/new.py", 7, "run", "step(batch)"),)
    assert read_traceback(["nothing of the kind"]).exception == ""


def test_a_mismatch_of_collectives_is_told_with_both_places_whatever_torch_puts_before_its_lines() -> None:
    told = [
        "rank 1 called broadcast where rank 0 called all_reduce (collective 6 of all ranks)",
        "  rank 1: broadcast(float32 [10], root 0) at train.py:8",
        "      dist.broadcast(x, 0)",
        "  rank 0: all_reduce(float32 [10], SUM) at train.py:10",
        "      dist.all_reduce(x)",
    ]
    trace = ["Traceback (most recent call last):", '  File "train.py", line 8, in <module>', "    dist.broadcast(x, 0)"]
    lines = [*trace, f"phalanx.CollectiveMismatchError: {told[0]}", *told[1:]]
    death = Death(1, 1, 3.0, stderr=[*(f"[rank1]: {line}" for line in lines), "something else"])
    text = block(death, tail=[], folder="/runs/x/1")
    assert text.splitlines()[:5] == [f"rank 1 failed: CollectiveMismatchError: {told[0]}", *told[1:]]


def test_the_block_has_all_that_is_known() -> None:
    death = Death(
        5,
        1,
        3.0,
        device="gpu 2",
        error=error("OSError: disk\nsecond line", 2.0, frames=[["/t.py", 4, "load", "read()"]]),
    )
    text = block(death, tail=["epoch 1"], folder="/runs/x/5", also=2)
    assert text.splitlines() == [
        "rank 5 (gpu 2) failed: OSError: disk",
        "  ended with exit code 1",
        "  /t.py:4 in load",
        "      read()",
        "  its last lines:",
        "    epoch 1",
        "  2 other ranks failed after it",
        "  all of its output: /runs/x/5",
    ]


def test_a_kill_is_explained_where_the_kernel_tells() -> None:
    told = block(Death(0, -signal.SIGKILL, 1.0, memory="the kernel killed it"), tail=[], folder="f")
    assert "the kernel killed it" in told
    assert "killed from outside" not in told
    untold = block(Death(0, -signal.SIGKILL, 1.0, stderr=["last words"]), tail=[], folder="f")
    assert "killed from outside" in untold
    assert "    last words" in untold
    assert report_of(Death(0, 1, 1.0)).exception == ""
