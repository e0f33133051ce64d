"""Table: faults between ranks. Deadlocks, messages, the network, joining."""

from __future__ import annotations

import pytest

from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import CallEvidence, Evidence, Gpu, NodeFacts, Rank
from tests.diagnose.made_evidence import (
    C10D,
    GETS,
    HERE,
    LIB,
    Case,
    beside,
    call,
    collective,
    evidence,
    frame,
    group,
    named_right,
    process,
    rank,
    waiting,
)


def message(op: str, number: int, peer: int, tag: int = 0, line: int = 70) -> Rank:
    stack = collective(op, line)
    calls = [
        call("all_reduce", 5, 4, done=True),
        CallEvidence(group="0", seq=0, op=op, peer=peer, tag=tag, site=tuple(stack)),
    ]
    return rank(number, stack, calls, size=2)


def joining(number: int, store: str, *, hosts: bool = False) -> Rank:
    stack = [frame(C10D, 1892, "init_process_group"), HERE]
    return rank(number, stack, store=store, given="127.0.0.1:4711", hosts=hosts)


def two_groups() -> Evidence:
    """Rank 0 is in x #5 and rank 1 in y #3. Both have to call both."""

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
    """With NCCL: both calls are queued, in different order, and the main thread is ahead of them."""

    def there(number: int, *order: tuple[str, int]) -> Rank:
        calls = [call("all_reduce", seq, 4, group=name) for name, seq in order]
        groups = [group(name, (0, 1), seq, backend="nccl") for name, seq in order]
        return rank(number, [frame("train.py", 60)], calls, groups=groups, proc=process("R"))

    return evidence(there(0, ("x", 5), ("y", 3)), there(1, ("y", 3), ("x", 5)))


def runs_ahead() -> Evidence:
    """With NCCL: rank 1 never called the collective that the GPUs of the others are in."""

    def there(number: int, last: int) -> Rank:
        calls = [call("all_reduce", seq, 4, done=seq < 5) for seq in range(3, last + 1)]
        groups = [group("0", range(3), last, backend="nccl")]
        return rank(number, [frame("train.py", 60)], calls, groups=groups, proc=process("R"))

    return evidence(there(0, 9), there(2, 7), rank(1, [GETS, HERE], [call("all_reduce", 4, 4, done=True)], size=3))


def pipeline() -> Evidence:
    """With NCCL: rank 1 has already called its next receive, and its GPU is still in the send before it."""

    def there(number: int, *calls: CallEvidence) -> Rank:
        return rank(number, [frame("train.py", 60)], calls, groups=[group("0", (0, 1), -1, backend="nccl")])

    send, receive = (call(op, 0, 4, peer=0) for op in ("send", "recv"))
    return evidence(there(0, call("recv", 0, 4, peer=1)), there(1, send, receive))


BETWEEN: dict[str, Case] = {
    "one is still joining, and the others have": (
        beside(rank(1, [frame(C10D, 1700, "init_process_group"), frame("train.py", 5)])),
        "join",
        (1,),
        ["rank 1 is still in init_process_group at train.py:5", "the other 3 wait for it in all_reduce #214"],
    ),
    "NCCL runs ahead": (
        runs_ahead(),
        "lock",
        (1,),
        ["the other 2 wait for it in all_reduce #5"],
    ),
    "NCCL runs ahead in a pipeline": (pipeline(), "network", (0, 1), ["rank 1 sends, rank 0 receives"]),
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
    "two nodes do not reach each other": (
        evidence(
            *(waiting(number, node=number // 2, size=6) for number in range(6)),
            nodes=[
                NodeFacts(node=0, host="a"),
                NodeFacts(node=1, host="b", unreached=(4,)),
                NodeFacts(node=2, host="c", unreached=(2,)),
            ],
        ),
        "partition",
        (4, 5),
        ["node 1 (b) and node 2 (c) do not reach each other, though node 0 reaches both"],
    ),
    "two nodes do not reach each other while the group forms": (
        evidence(
            waiting(0, node=0, size=3),
            *(
                rank(number, [frame(C10D, 1500, "init_process_group"), frame("a.py", 7)], node=number)
                for number in (1, 2)
            ),
            nodes=[
                NodeFacts(node=0, host="a"),
                NodeFacts(node=1, host="b", unreached=(2,)),
                NodeFacts(node=2, host="c", unreached=(1,)),
            ],
        ),
        "partition",
        (2,),
        ["node 1 (b) and node 2 (c) do not reach each other"],
    ),
    "a node that two others do not reach": (
        evidence(
            *(waiting(number, node=number) for number in range(4)),
            nodes=[
                NodeFacts(node=0, host="a"),
                NodeFacts(node=1, host="b", unreached=(2, 3)),
                NodeFacts(node=2, host="c", unreached=(1,)),
                NodeFacts(node=3, host="d", unreached=(1,)),
            ],
        ),
        "partition",
        (1,),
        ["node 1 (b) and node 2 (c) do not reach each other; node 1 (b) and node 3 (d)"],
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
        ["rank 1 has not reached init_process_group (sleeping at train.py:18)", "rank 0"],
    ),
    "joining, and some never came": (
        evidence(rank(0, [frame(C10D, 1892, "init_process_group"), HERE]), world_size=3),
        "join",
        (1, 2),
        ["ranks 1, 2 of 3 have never joined", "init_process_group at train.py:33"],
    ),
    "joining, and nobody meets": (
        evidence(*(rank(number, [frame(C10D, 1892, "init_process_group"), HERE]) for number in range(3))),
        "join",
        (),
        ["all 3 ranks are in init_process_group"],
    ),
    "joining at ports that the script has set": (
        evidence(*(joining(number, f"127.0.0.1:{29500 + number}") for number in range(2))),
        "address",
        (0, 1),
        [
            "rank 0 waits for a store at 127.0.0.1:29500; rank 1 waits for a store at 127.0.0.1:29501 in "
            "init_process_group at train.py:33 in flush: the script has set MASTER_PORT (no rank listens "
            "there, the launcher's store is at 127.0.0.1:4711)"
        ],
    ),
    "joining at a host that the script has set": (
        evidence(*(joining(number, "gone.example:4711") for number in range(2))),
        "address",
        (0, 1),
        ["ranks 0, 1 wait for a store at gone.example:4711", "the script has set MASTER_ADDR ("],
    ),
    "joining where another rank hosts": (
        evidence(*(joining(number, f"127.0.0.1:{29500 + number}", hosts=True) for number in range(2))),
        "address",
        (1,),
        ["rank 1 waits for a store at 127.0.0.1:29501", "rank 0 should host the store"],
    ),
    "joining where rank 0 hosts for all": (
        evidence(*(joining(number, "127.0.0.1:29500", hosts=True) for number in range(2))),
        "join",
        (),
        ["all 2 ranks are in init_process_group"],
    ),
    "a group that only one makes": (
        evidence(
            rank(0, [frame(C10D, 2169, "_new_process_group_helper"), frame(C10D, 5863, "new_group"), HERE]),
            rank(1, [frame("train.py", 20, source="input()")]),
        ),
        "join",
        (1,),
        ["rank 1 has not reached new_group", "waiting for input at train.py:20"],
    ),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_named_right(case: str) -> None:
    verdict = named_right(BETWEEN[case])
    assert verdict.certain == (verdict.kind not in ("network", "join", "lock") or "never joined" in verdict.text)


def test_what_to_type_for_a_port_that_the_script_has_set() -> None:
    one = evidence(*(joining(number, "127.0.0.1:29500") for number in range(2)))
    assert "type: phalanx run --master-port 29500 …" in diagnose(one)[0].fix
    several = evidence(*(joining(number, f"127.0.0.1:{29500 + number}") for number in range(2)))
    assert "--master-port" not in diagnose(several)[0].fix
