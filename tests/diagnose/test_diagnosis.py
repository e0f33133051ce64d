"""Evidence -> verdict, as a table: what is wrong is named right, and what is merely slow gets no verdict."""

from __future__ import annotations

import pytest

from phalanx.diagnose.diagnosis import diagnose, remarks
from phalanx.diagnose.evidence import Call, Evidence, Gpu, Node, Rank, Thread, decode, encode
from tests.diagnose.scene import (
    C10D,
    DDP,
    LIB,
    STD,
    backward,
    behind,
    beside,
    call,
    collective,
    evidence,
    frame,
    group,
    loading,
    past,
    process,
    rank,
    waiting,
    workers,
)

HERE = frame("train.py", 33, "flush")
ITEM = frame("dataset.py", 41, "__getitem__")
GETS = frame(STD + "threading.py", 327, "wait")
IN_LOOP = {"loop": 48, "source": "dist.all_reduce(loss)"}
AFTER_LOOP = {"loop": 0, "source": "dist.barrier()"}


def message(op: str, number: int, peer: int, tag: int = 0, line: int = 70) -> Rank:
    stack = collective(op, line)
    calls = [call("all_reduce", 5, 4, done=True), Call(group="0", seq=0, op=op, peer=peer, tag=tag, site=tuple(stack))]
    return rank(number, stack, calls, size=2)


def two_groups() -> Evidence:
    """Rank 0 is in x #5 and rank 1 in y #3; each has both to do."""

    def there(number: int, inside: str, seq: int, line: int, other: str, before: int) -> Rank:
        calls = [call("all_reduce", before, 4, group=other, done=True), call("all_reduce", seq, 4, group=inside)]
        return rank(
            number,
            collective("all_reduce", line),
            calls,
            groups=[group(inside, (0, 1), seq), group(other, (0, 1), before)],
        )

    return evidence(there(0, "x", 5, 30, "y", 2), there(1, "y", 3, 35, "x", 4))


def crossed() -> Evidence:
    """As NCCL has it: both are queued, in different order, and the main thread is ahead of them."""

    def there(number: int, *order: tuple[str, int]) -> Rank:
        calls = [call("all_reduce", seq, 4, group=name) for name, seq in order]
        groups = [group(name, (0, 1), seq, backend="nccl") for name, seq in order]
        return rank(number, [frame("train.py", 60)], calls, groups=groups, proc=process("R"))

    return evidence(there(0, ("x", 5), ("y", 3)), there(1, ("y", 3), ("x", 5)))


def parted(odd: list[Call], odd_stack: list, usual: list[Call], stack: list, culprit: int = 0) -> Evidence:
    """Four ranks; one of them has made other calls."""
    return evidence(
        *(
            rank(number, odd_stack if number == culprit else stack, odd if number == culprit else usual)
            for number in range(4)
        )
    )


REDUCE, NORM, BARRIER = call("all_reduce", 0, 10), call("all_reduce", 0, 1), call("barrier", 0)
LOOP = past(8, REDUCE, NORM)  # 1 to 8: the next is REDUCE
BUCKETS = past(
    8, call("all_reduce", 0, 100), call("all_reduce", 0, 200), call("all_reduce", 0, 1), call("broadcast", 0, 3)
)

DESYNC = {
    "more inside a condition": (
        parted(
            [*LOOP, call("barrier", 9)],
            collective("barrier", 88, guard="if rank == 0"),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 52),
        ),
        "skipped collective",
        (0,),
        [
            "rank 0 called one more collective than the others",
            "`if rank == 0`",
            "train.py:88",
            "all_reduce #9",
            "train.py:52",
        ],
    ),
    "fewer, by a condition": (
        parted(
            [*LOOP, call("barrier", 9)],
            collective("barrier", 95),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 88, guard="if rank != 0"),
        ),
        "skipped collective",
        (0,),
        ["rank 0 skipped a collective that the other 3 called inside `if rank != 0` at train.py:88", "barrier #9"],
    ),
    "fewer, by what the loop did before": (
        parted(
            [*LOOP, call("all_reduce", 9, 1)],
            collective("all_reduce", 54),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 52),
            culprit=2,
        ),
        "skipped collective",
        (2,),
        ["rank 2 skipped a collective", "train.py:52", "went on to all_reduce #9 at train.py:54"],
    ),
    "another operation": (
        parted(
            [call("broadcast", 3, 4)],
            collective("broadcast", 20),
            [call("all_reduce", 3, 4)],
            collective("all_reduce", 22),
            1,
        ),
        "wrong operation",
        (1,),
        ["rank 1 called broadcast at train.py:20 where the other 3 called all_reduce at train.py:22 (#3)"],
    ),
    "another operation, each in its branch": (
        parted(
            [*LOOP, call("broadcast", 9, 4)],
            collective("broadcast", 20, guard="if rank == 1"),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 22, guard="else of if rank == 1"),
            1,
        ),
        "wrong operation",
        (1,),
        ["rank 1 called broadcast", "the other 3 called all_reduce"],
    ),
    "a root that is done before the others come": (
        parted(
            [call("broadcast", 3, 4, done=True)],
            loading(ITEM),
            [call("all_reduce", 3, 4)],
            collective("all_reduce", 22),
            1,
        ),
        "wrong operation",
        (1,),
        ["rank 1 called broadcast where the other 3 called all_reduce"],
    ),
    "shapes": (
        parted(
            [call("all_reduce", 3, 10)],
            collective("all_reduce"),
            [call("all_reduce", 3, 12)],
            collective("all_reduce"),
            3,
        ),
        "shapes differ",
        (3,),
        ["shapes differ in all_reduce #3 at train.py:52: rank 3 has [10], the other 3 have [12]"],
    ),
    "dtypes": (
        parted(
            [call("all_reduce", 3, 10, dtype="Half")],
            collective("all_reduce"),
            [call("all_reduce", 3, 10)],
            collective("all_reduce"),
        ),
        "dtypes differ",
        (0,),
        ["dtypes differ", "rank 0 has Half, the other 3 have Float"],
    ),
    "reductions": (
        parted(
            [call("all_reduce", 3, 10, reduction="MAX")],
            collective("all_reduce"),
            [call("all_reduce", 3, 10, reduction="SUM")],
            collective("all_reduce"),
        ),
        "reductions differ",
        (0,),
        ["rank 0 has MAX, the other 3 have SUM"],
    ),
    "roots": (
        parted(
            [call("broadcast", 3, 10, root=1)],
            collective("broadcast"),
            [call("broadcast", 3, 10, root=0)],
            collective("broadcast"),
            2,
        ),
        "roots differ",
        (2,),
        ["rank 2 has root 1, the other 3 have root 0"],
    ),
    "left the loop for a barrier": (
        parted(
            [*LOOP, call("barrier", 9)],
            collective("barrier", 70, **AFTER_LOOP),
            [*LOOP, call("all_reduce", 9, 10)],
            collective("all_reduce", 52, **IN_LOOP),
            1,
        ),
        "uneven data",
        (1,),
        ["rank 1 left the loop earlier", "barrier #9 at train.py:70", "all_reduce #9", "uneven data"],
    ),
    "left DDP's loop, seen through the function that both are in": (
        parted(
            [*past(8, REDUCE), call("barrier", 9)],
            [*collective("barrier", 12, function="finish"), frame("train.py", 90, "main", source="finish()")],
            [*past(8, REDUCE), call("all_reduce", 9, 10)],
            [*backward(31), frame("train.py", 85, "main", loop=84, source="step(batch)")],
            1,
        ),
        "uneven data",
        (1,),
        ["rank 1 left the loop", "DDP"],
    ),
    "unused parameters": (
        parted(
            [*BUCKETS, call("all_reduce", 9, 100, done=True, site=tuple(backward())), call("all_reduce", 10, 1)],
            collective("all_reduce", 64),
            [*BUCKETS, call("all_reduce", 9, 100, done=True, site=tuple(backward())), call("all_reduce", 10, 200)],
            backward(),
            2,
        ),
        "unused parameters",
        (2,),
        [
            "rank 2 did not reduce a DDP bucket",
            "all_reduce #10 (DDP",
            "train.py:60",
            "went on to all_reduce #10 at train.py:64",
        ],
    ),
    "evaluation on one rank": (
        parted(
            [*LOOP, call("broadcast", 9, 3)],
            [
                frame(DDP, 2427, "_sync_module_buffers"),
                frame(DDP, 2405, "_sync_buffers"),
                frame(DDP, 1884, "forward"),
                frame("eval.py", 12, "evaluate"),
                frame("train.py", 80, guard="if rank == 0"),
            ],
            [*LOOP, call("barrier", 9)],
            collective("barrier", 82),
        ),
        "evaluation",
        (0,),
        ["rank 0 alone runs the forward of a DDP model", "`if rank == 0`", "barrier #9 at train.py:82"],
    ),
}

KEPT = {
    "data: a lock": (
        beside(behind(2, loading(ITEM), proc=process(wchan="futex_do_wait"))),
        "data",
        (2,),
        [
            "rank 2 is in data loading, dataset.py:41 in __getitem__ (waiting for a lock); "
            "the other 3 wait for it in all_reduce #214 (6.5 MB) at train.py:52"
        ],
    ),
    "data: workers": (
        beside(behind(1, workers(), proc=process(children=("77 S pt_data_worker", "78 S pt_data_worker")))),
        "data",
        (1,),
        ["waiting for its DataLoader workers", "train.py:50"],
    ),
    "data: a worker is dead": (
        beside(behind(1, workers(), proc=process(children=("77 Z pt_data_worker", "78 S pt_data_worker")))),
        "data",
        (1,),
        ["a DataLoader worker that is dead: process 77"],
    ),
    "data: a worker in D": (
        beside(behind(1, workers(), proc=process(children=("77 D pt_data_worker",)))),
        "data",
        (1,),
        ["waiting for a disk or NFS: process 77"],
    ),
    "data: workers of whom nothing is known": (beside(behind(1, workers())), "data", (1,), ["its DataLoader workers)"]),
    "data: NFS": (
        beside(behind(3, loading(ITEM), proc=process("D", wchan="rpc_wait_bit_killable"))),
        "data",
        (3,),
        ["dataset.py:41", "network file system"],
    ),
    "data: while a collective is under way": (
        beside(rank(2, loading(ITEM), [call("all_reduce", 213, 1_625_000)], proc=process(wchan="futex_do_wait"))),
        "data",
        (2,),
        ["waiting for a lock"],
    ),
    "lock": (beside(behind(2, [GETS, HERE])), "lock", (2,), ["rank 2 is waiting for a lock at train.py:33 in flush"]),
    "queue": (beside(behind(2, [GETS, frame(STD + "queue.py", 171, "get"), HERE])), "lock", (2,), ["for a queue"]),
    "lock by the text of the line": (
        beside(behind(0, [frame("train.py", 7, source="lock.acquire()")])),
        "lock",
        (0,),
        ["waiting for a lock at train.py:7"],
    ),
    "thread": (
        beside(
            behind(
                2,
                [
                    frame(STD + "threading.py", 1139, "_wait_for_tstate_lock"),
                    frame(STD + "threading.py", 1, "join"),
                    HERE,
                ],
            )
        ),
        "lock",
        (2,),
        ["for a thread to end"],
    ),
    "input": (
        beside(behind(1, [frame("train.py", 9, source="if input() == 'y':")], proc=process(wchan="anon_pipe_read"))),
        "input",
        (1,),
        ["rank 1 is waiting for input at train.py:9"],
    ),
    "sleep": (
        beside(behind(1, [HERE], proc=process(wchan="hrtimer_nanosleep"))),
        "sleep",
        (1,),
        ["is sleeping at train.py:33"],
    ),
    "subprocess": (
        beside(
            behind(1, [frame(STD + "subprocess.py", 2004, "_try_wait"), frame(STD + "subprocess.py", 550, "run"), HERE])
        ),
        "subprocess",
        (1,),
        ["a process that it has started"],
    ),
    "file": (
        beside(behind(1, [HERE], proc=process("D", wchan="folio_wait_bit_common"))),
        "file",
        (1,),
        ["for a disk at train.py:33"],
    ),
    "requests": (
        beside(
            behind(0, [frame(STD + "socket.py", 706, "readinto"), frame(LIB + "requests/api.py", 59, "request"), HERE])
        ),
        "socket",
        (0,),
        ["waiting for the network at train.py:33"],
    ),
    "store": (
        beside(
            behind(1, [frame("train.py", 62, source='store.get("key")')], proc=process(wchan="poll_schedule_timeout"))
        ),
        "store",
        (1,),
        ["waiting for a key of the store at train.py:62, which nobody has set"],
    ),
    "endless loop": (
        beside(behind(1, [HERE], proc=process("R"))),
        "loop",
        (1,),
        ["rank 1 loops", "train.py:33 in flush"],
    ),
    "endless loop over many lines": (
        beside(behind(1, [HERE], proc=process("R"), busy=True, since=400.0), waited=400.0),
        "loop",
        (1,),
        ["rank 1 loops"],
    ),
    "checkpoint that does not move": (
        beside(
            behind(0, [frame(LIB + "torch/serialization.py", 1003, "save"), HERE], proc=process("D", wchan="nfs_wait"))
        ),
        "checkpoint",
        (0,),
        ["writing or reading a checkpoint (waiting for a network file system) at train.py:33"],
    ),
    "kernel that does not end": (
        beside(
            behind(
                1,
                [frame(LIB + "torch/cuda/__init__.py", 1040, "synchronize"), HERE],
                proc=process("R"),
                gpu=Gpu(index=1, use=1.0),
            )
        ),
        "gpu",
        (1,),
        ["waits for the GPU (GPU 1, 100% in use)", "train.py:33"],
    ),
    "nothing but a place": (
        beside(behind(1, [HERE])),
        "stands",
        (1,),
        ["rank 1 has stood for 40 s at train.py:33 in flush"],
    ),
    "nothing at all": (
        beside(Rank(rank=1, node=0, note="its page is empty", since=40.0)),
        "unknown",
        (1,),
        ["rank 1 gives no sign", "its page is empty"],
    ),
    "has ended well": (
        beside(rank(1, [], [call("all_reduce", 213, 4, done=True)], ended=0, step=99)),
        "uneven data",
        (1,),
        ["rank 1 left the loop earlier", "ended with exit code 0", "all_reduce #214", "uneven data"],
    ),
    "destroys its group": (
        beside(behind(1, [frame(C10D, 2300, "destroy_process_group"), frame("train.py", 99)])),
        "uneven data",
        (1,),
        ["is in destroy_process_group at train.py:99"],
    ),
    "at exit": (
        beside(behind(3, [frame(STD + "threading.py", 1590, "_shutdown")])),
        "uneven data",
        (3,),
        ["is at its end"],
    ),
    "ended, and the others asked for their rank": (
        evidence(
            rank(0, collective("barrier", 88, guard="if rank == 0"), [call("barrier", 5)]),
            *(rank(number, [], [call("all_reduce", 4, 4, done=True)], ended=0) for number in (1, 2, 3)),
        ),
        "skipped collective",
        (0,),
        ["rank 0 called one more collective than the others, barrier #5", "`if rank == 0`", "ranks 1-3 ended with"],
    ),
    "most have left": (
        evidence(
            *(rank(number, [], [call("all_reduce", 213, 4, done=True)], ended=0) for number in (1, 2)),
            waiting(0),
            waiting(3),
        ),
        "uneven data",
        (1, 2),
        ["ranks 1, 2 left the loop", "the other 2 still wait in all_reduce #214"],
    ),
    "two at one place": (
        beside(behind(1, [GETS, HERE]), behind(2, [GETS, HERE])),
        "lock",
        (1, 2),
        ["ranks 1, 2 are waiting for a lock at train.py:33 in flush; the other 2 wait for them in all_reduce #214"],
    ),
    "a message under way": (
        evidence(*(rank(number, [frame("train.py", 48, source="work.wait()")]) for number in range(2))),
        "message",
        (0, 1),
        ["ranks 0, 1 are waiting for what is under way at train.py:48"],
    ),
    "crashed": (
        beside(behind(1, [], ended=1)),
        "exited",
        (1,),
        ["rank 1 ended with exit code 1; the other 3 wait for it"],
    ),
    "killed": (beside(behind(1, [], ended=-9)), "exited", (1,), ["rank 1 was killed by SIGKILL"]),
}

PROVEN = {
    "stopped": (
        beside(behind(3, [HERE], proc=process("T"))),
        "stopped",
        (3,),
        ["rank 3 is stopped (SIGSTOP)", "the other 3 wait"],
    ),
    "stopped in a collective": (
        beside(waiting(3, proc=process("T"))),
        "stopped",
        (3,),
        ["rank 3 is stopped", "the other 3 wait for it"],
    ),
    "traced": (beside(behind(3, [HERE], proc=process("t"))), "traced", (3,), ["held by a tracer"]),
    "swapping": (
        beside(
            behind(1, [HERE], proc=process("D", swapped=3_200_000_000, major_faults=900.0)),
            nodes=[Node(node=0, host="a", memory=16_000_000_000, available=100_000_000)],
        ),
        "memory",
        (1,),
        ["rank 1 is out of memory and swapping (3.2 GB on disk)", "train.py:33"],
    ),
    "GIL, spinning": (
        beside(behind(2, [HERE], proc=process("R"), silent=38.0)),
        "gil",
        (2,),
        ["rank 2 spins holding the GIL at train.py:33 in flush"],
    ),
    "GIL, asleep": (
        beside(behind(2, [HERE], proc=process(wchan="hrtimer_nanosleep"), silent=38.0)),
        "gil",
        (2,),
        ["rank 2 holds the GIL while sleeping at train.py:33"],
    ),
    "GPU": (
        beside(waiting(1, gpu=Gpu(index=5, use=0.0, lost=True)), nodes=[Node(node=0, host="b")]),
        "gpu lost",
        (1,),
        ["GPU 5 of node b"],
    ),
    "node lost": (
        evidence(
            waiting(0, node=0),
            waiting(1, seq=213, node=1),
            nodes=[Node(node=0, host="a"), Node(node=1, host="b", lost=True)],
        ),
        "node",
        (1,),
        ["node b (rank 1) does not answer"],
    ),
    "node silent": (
        evidence(
            waiting(0, node=0),
            waiting(1, seq=213, node=1),
            nodes=[Node(node=1, host="b", silent=12.0, finding="link down: eth1")],
        ),
        "node",
        (1,),
        ["node b (rank 1) does not answer: link down: eth1"],
    ),
}

BETWEEN = {
    "two groups": (
        two_groups(),
        "deadlock",
        (0, 1),
        [
            "deadlock between two groups",
            "rank 0 is in all_reduce #5 of group x at train.py:30, which needs rank 1",
            "train.py:35",
        ],
    ),
    "two groups of NCCL": (crossed(), "deadlock", (0, 1), ["deadlock between two groups", "group x", "group y"]),
    "both send": (
        evidence(message("send", 0, 1), message("send", 1, 0)),
        "both send",
        (0, 1),
        ["ranks 0, 1 both send to each other"],
    ),
    "both receive": (
        evidence(message("recv", 0, 1), message("recv", 1, 0)),
        "both receive",
        (0, 1),
        ["both wait to receive"],
    ),
    "tags": (
        evidence(message("send", 0, 1, 3), message("recv", 1, 0, 5)),
        "wrong tag",
        (0, 1),
        ["different tags", "tag 3", "tag 5"],
    ),
    "send without a receive": (
        evidence(message("send", 0, 1), rank(1, collective("barrier", 90), [call("barrier", 6)], size=2)),
        "send without a receive",
        (0, 1),
        ["rank 0 is in send to rank 1 at train.py:70", "does not receive it", "barrier #6 at train.py:90"],
    ),
    "receive without a send": (
        evidence(message("recv", 1, 0), rank(0, [], [call("all_reduce", 5, 4, done=True)], ended=0)),
        "receive without a send",
        (0, 1),
        ["rank 1 is in recv from rank 0", "ended with exit code 0"],
    ),
    "circle of messages": (
        evidence(message("send", 0, 1), message("send", 1, 2), message("send", 2, 0)),
        "deadlock",
        (0, 1, 2),
        ["a circle of messages"],
    ),
    "the network": (
        evidence(*(waiting(number) for number in range(4)), finding="12% of packets are lost between a and b"),
        "network",
        (),
        ["all 4 ranks wait in the same collective, all_reduce #214 (6.5 MB) at train.py:52: the network (12% of"],
    ),
    "the network, NCCL": (
        evidence(
            *(
                rank(
                    number,
                    [frame("train.py", 61)],
                    [call("all_reduce", 9, 4)],
                    groups=[group("0", range(2), 9, backend="nccl")],
                    proc=process("R"),
                    gpu=Gpu(index=number, use=1.0),
                )
                for number in range(2)
            )
        ),
        "network",
        (),
        ["all 2 ranks", "all_reduce #9", "train.py:61"],
    ),
    "a message that does not arrive": (
        evidence(message("send", 0, 1, 3), message("recv", 1, 0, 3)),
        "network",
        (0, 1),
        ["rank 0 sends, rank 1 receives"],
    ),
    "one is left behind": (
        evidence(
            waiting(0, "broadcast", 5, 4), rank(1, [HERE], [call("broadcast", 5, 4, done=True)], size=2, busy=True)
        ),
        "network",
        (0,),
        ["rank 0 is still in broadcast #5", "rank 1 has left behind"],
    ),
    "joining, and one is late": (
        evidence(
            rank(
                0,
                [
                    frame(LIB + "torch/distributed/rendezvous.py", 199, "_create"),
                    frame(C10D, 1892, "init_process_group"),
                    HERE,
                ],
            ),
            rank(1, [frame("train.py", 18)], proc=process(wchan="hrtimer_nanosleep")),
        ),
        "join",
        (1,),
        ["rank 1 has not come to init_process_group (sleeping at train.py:18)", "rank 0"],
    ),
    "joining, and some never came": (
        evidence(rank(0, [frame(C10D, 1892, "init_process_group"), HERE]), world_size=3),
        "join",
        (1, 2),
        ["ranks 1, 2 of 3 have never come", "init_process_group at train.py:33"],
    ),
    "joining, and nobody meets": (
        evidence(*(rank(number, [frame(C10D, 1892, "init_process_group"), HERE]) for number in range(3))),
        "join",
        (),
        ["all 3 ranks are in init_process_group"],
    ),
    "a group that only one makes": (
        evidence(
            rank(0, [frame(C10D, 2169, "_new_process_group_helper"), frame(C10D, 5863, "new_group"), HERE]),
            rank(1, [frame("train.py", 20, source="input()")]),
        ),
        "join",
        (1,),
        ["rank 1 has not come to new_group", "waiting for input at train.py:20"],
    ),
}

CASES = {**DESYNC, **KEPT, **PROVEN, **BETWEEN}


@pytest.mark.parametrize("case", CASES)
def test_named_right(case: str) -> None:
    seen, kind, ranks, said = CASES[case]
    verdicts = diagnose(decode(encode(seen)))
    assert verdicts, "no verdict"
    first = verdicts[0]
    assert (first.kind, first.ranks) == (kind, ranks), first.text
    for words in said:
        assert words in first.text, first.text


@pytest.mark.parametrize("case", [*DESYNC, *PROVEN, "two groups", "both send", "tags"])
def test_certain(case: str) -> None:
    assert diagnose(CASES[case][0])[0].certain


@pytest.mark.parametrize("case", ["data: a lock", "endless loop", "lock", "the network", "sleep"])
def test_not_certain(case: str) -> None:
    assert not diagnose(CASES[case][0])[0].certain


COMPILER = [frame(LIB + "torch/_dynamo/convert_frame.py", 62, "compile_inner"), frame("train.py", 40, "step")]
HEALTHY = {
    "everything goes on": evidence(waiting(0, since=0.1), behind(1, loading(ITEM), since=0.1), waited=0.1),
    "a slow step among slow steps": evidence(
        waiting(0, since=8.0, usual=6.0), behind(1, [HERE], since=8.0, usual=6.0), waited=8.0
    ),
    "all wait, and not for long": evidence(*(waiting(number, since=0.4) for number in range(4)), waited=0.4),
    "one computes": beside(behind(1, [HERE], proc=process("R"), busy=True)),
    "evaluation on rank 0": beside(behind(0, [frame("eval.py", 12, "evaluate")], proc=process("R"), busy=True)),
    "one compiles": beside(behind(1, COMPILER, proc=process("R"), phase="compile")),
    "one waits for processes that compile for it": beside(
        behind(1, [frame(STD + "concurrent/futures/_base.py", 451, "result"), *COMPILER])
    ),
    "one imports": beside(behind(1, [frame("<frozen importlib._bootstrap>", 241, "_load"), HERE], proc=process("R"))),
    "one writes a checkpoint": beside(
        behind(0, [frame(LIB + "torch/serialization.py", 1003, "save"), HERE], proc=process("D", written=2e8))
    ),
    "a debugger is open": beside(behind(1, [frame(STD + "pdb.py", 300, "interaction"), HERE], debugged=True)),
    "a debugger, and all wait": evidence(*(waiting(number, debugged=number == 0) for number in range(4))),
    "ranks that compute alone": evidence(*(rank(number, [HERE], proc=process("R"), busy=True) for number in range(2))),
    "alone, in one long call": evidence(rank(0, [HERE], proc=process("R"))),
    "all ended": evidence(*(rank(number, [], ended=0) for number in range(2))),
    "an all_gather that may be uneven": evidence(
        *(
            rank(
                number,
                collective("all_gather"),
                [call("all_gather", 3, 4 + number, outputs=((4,), (5,), (6,)))],
                since=0.5,
            )
            for number in range(3)
        ),
        waited=0.5,
    ),
    "nobody": evidence(),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_no_verdict(case: str) -> None:
    assert diagnose(HEALTHY[case]) == []


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "one compiles",
            "rank 1 compiles at train.py:40 in step: slow, and not stuck; the other 3 wait for it in",
        ),
        ("one writes a checkpoint", "rank 0 writes or reads a checkpoint at train.py:33 in flush: slow, and not stuck"),
        ("one computes", "rank 1 computes at train.py:33"),
        ("a debugger is open", "a debugger is open in rank 1"),
    ],
)
def test_remark(case: str, said: str) -> None:
    assert remarks(HEALTHY[case])[0].startswith(said)


def test_two_culprits_are_both_named() -> None:
    seen = beside(behind(1, [HERE], proc=process("T")), behind(2, loading(ITEM), proc=process(wchan="futex_do_wait")))
    assert [(verdict.kind, verdict.ranks) for verdict in diagnose(seen)] == [("stopped", (1,)), ("data", (2,))]


def test_thread_that_holds_the_lock_is_named() -> None:
    seen = behind(2, collective("all_reduce"), proc=process("R"), silent=38.0)
    other = Thread(name="logger", frames=(frame("log.py", 5, "write"),), holds_gil=True)
    seen = beside(Rank(**{**_fields(seen), "threads": (*seen.threads, other)}))
    assert "spins holding the GIL at log.py:5 in write in thread logger" in diagnose(seen)[0].text


def test_bucket_is_numbered_where_that_can_be_seen() -> None:
    before = [call("broadcast", 212, 3, done=True), call("all_reduce", 213, 100, done=True, site=tuple(backward()))]
    waits = [rank(number, backward(), [*before, call("all_reduce", 214, 1_625_000)]) for number in (0, 1, 3)]
    text = diagnose(evidence(*waits, behind(2, loading(ITEM), proc=process(wchan="futex_do_wait"))))[0].text
    assert "the other 3 wait for it in all_reduce #214 (DDP bucket 1, 6.5 MB) at train.py:60" in text


def test_many_ranks() -> None:
    size = 256
    seen = beside(behind(170, loading(ITEM), proc=process(wchan="futex_do_wait"), size=size), size=size)
    verdict = diagnose(seen)[0]
    assert verdict.ranks == (170,)
    assert "the other 255 wait for it" in verdict.text


def test_worker_of_a_loader_without_a_fetcher_frame_is_data_by_its_phase() -> None:
    seen = beside(behind(1, [frame("reader.py", 9, "read")], phase="data", proc=process("D")))
    assert (
        "rank 1 is in data loading, reader.py:9 in read (waiting for a disk or another device)"
        in diagnose(seen)[0].text
    )


def _fields(rank: Rank) -> dict[str, object]:
    return {name: getattr(rank, name) for name in rank.__struct_fields__}
