"""The first difference between the records of ranks: tables, and generated records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.diagnose import history as histories
from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import CallEvidence, History
from phalanx.diagnose.history import Difference, first_difference
from phalanx.forkserver.probe.collectives import collective_history as kept
from phalanx.launcher.evidence import evidence_reply
from tests.diagnose.made_evidence import C10D, DDP, HOME
from tests.diagnose.recorded import Entry, coalesced, entry, history, reply, stalled

REDUCE = [entry("all_reduce", seq, 10) for seq in range(1, 41)]  # a loop with one collective
STEP = [
    entry("all_reduce", seq, 10) if seq % 2 else entry("all_reduce", seq, 1, line=14) for seq in range(1, 41)
]  # a loop with two collectives


def differ(ranks: Mapping[int, Sequence[Entry]], group: str = "0", backend: str = "nccl") -> Difference | None:
    logs = {rank: histories.logs(history(entries)) for rank, entries in ranks.items()}
    return first_difference({rank: log[group, backend] for rank, log in logs.items() if (group, backend) in log})


def replaced(entries: Sequence[Entry], *others: Entry) -> list[Entry]:
    """Replace the entries that have the numbers of `others`."""
    numbers = {each["collective_seq_id"] for each in others}
    rest = [each for each in entries if each["collective_seq_id"] not in numbers]
    return sorted([*rest, *others], key=lambda each: each["collective_seq_id"])


def renumbered(entries: Sequence[Entry]) -> list[Entry]:
    return [{**each, "collective_seq_id": seq, "record_id": seq - 1} for seq, each in enumerate(entries, 1)]


# -- what differs

DIFFERENT: dict[str, tuple[dict[int, list[Entry]], int, tuple[tuple[int, ...], ...]]] = {
    "another operation": (
        {0: REDUCE, 1: replaced(REDUCE, entry("broadcast", 31, 10, line=6)), 2: REDUCE, 3: REDUCE},
        31,
        ((1,), (0, 2, 3)),
    ),
    "another size": (
        {0: REDUCE, 1: REDUCE, 2: replaced(REDUCE, entry("all_reduce", 31, 5))},
        31,
        ((2,), (0, 1)),
    ),
    "another dtype": (
        {0: REDUCE, 1: REDUCE, 2: replaced(REDUCE, entry("all_reduce", 8, 10, dtype="Half"))},
        8,
        ((2,), (0, 1)),
    ),
    "one less": ({0: STEP, 1: STEP, 2: renumbered([*STEP[:20], *STEP[21:]])}, 21, ((2,), (0, 1))),
    "two that differ at two places": (
        {0: replaced(REDUCE, entry("barrier", 9)), 1: REDUCE, 2: replaced(REDUCE, entry("barrier", 4)), 3: REDUCE},
        4,
        ((2,), (0, 1, 3)),
    ),
    "two ranks: the one that is not rank 0": (
        {0: REDUCE, 1: replaced(REDUCE, entry("broadcast", 31, 10))},
        31,
        ((1,), (0,)),
    ),
    "scatter: the outputs, which NCCL records as inputs": (
        {
            0: [entry("scatter", 1, inputs=[[2]], outputs=[[2], [2]])],
            1: [entry("scatter", 1, inputs=[[2]], outputs=[[0]])],
            2: [entry("scatter", 1, inputs=[[3]], outputs=[[0]])],
        },
        1,
        ((2,), (0, 1)),
    ),
    "older than the records of one": (
        {0: REDUCE, 1: REDUCE[20:], 2: replaced(REDUCE, entry("broadcast", 3, 10)), 3: REDUCE},
        3,
        ((2,), (0, 3)),
    ),
    "inside a coalesced block": (
        {
            0: coalesced(1, entry("all_reduce", 1, 4), entry("all_reduce", 1, 5)),
            1: coalesced(1, entry("all_reduce", 1, 4), entry("all_reduce", 1, 5)),
            2: coalesced(1, entry("all_reduce", 1, 4), entry("all_reduce", 1, 6)),
        },
        1,
        ((2,), (0, 1)),
    ),
    "fewer in a coalesced block": (
        {
            0: [*coalesced(1, entry("all_reduce", 1, 4), entry("all_reduce", 1, 5)), entry("barrier", 2)],
            1: [*coalesced(1, entry("all_reduce", 1, 4), entry("all_reduce", 1, 5)), entry("barrier", 2)],
            2: [*coalesced(1, entry("all_reduce", 1, 4)), entry("barrier", 2)],
        },
        1,
        ((2,), (0, 1)),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_first_difference_is_found(case: str) -> None:
    ranks, seq, sides = DIFFERENT[case]
    found = differ(ranks)
    assert found is not None
    assert (found.seq, tuple(side.ranks for side in found.sides)) == (seq, sides)


# -- what may differ

SENDS = [entry("send 0->1", seq, 100 + seq, p2p=seq) for seq in range(1, 9)]
UNEVEN = [[3], [5], [2]]
ALIKE: dict[str, dict[int, list[Entry]]] = {
    "nothing": {0: REDUCE, 1: REDUCE, 2: REDUCE},
    "nobody": {},
    "one": {0: REDUCE},
    "one that has recorded nothing": {0: REDUCE, 1: []},
    "one that is behind": {0: REDUCE, 1: REDUCE[:12], 2: REDUCE},
    "one whose older records are overwritten": {0: REDUCE, 1: REDUCE[20:], 2: REDUCE[:15]},
    "a difference that no other rank has a record of": {
        0: replaced(REDUCE, entry("broadcast", 3, 10)),
        1: REDUCE[20:],
        2: REDUCE[12:],
    },
    "no common range": {0: REDUCE[:10], 1: REDUCE[20:]},
    "messages of a pair of ranks": {
        0: [*SENDS, entry("all_reduce", 9, 4)],
        1: [entry("recv 1<-0", 3, 5, p2p=1), entry("all_reduce", 9, 4)],
        2: [entry("all_reduce", 9, 4)],
    },
    "coalesced messages": {
        0: [*coalesced(4, entry("send 0->1", 4, 7, p2p=1), p2p=1), entry("barrier", 5)],
        1: [
            *coalesced(4, entry("recv 1<-0", 4, 7, p2p=1), entry("send 1->2", 4, 9, p2p=1), p2p=1),
            entry("barrier", 5),
        ],
        2: [entry("barrier", 5)],
    },
    "coalesced messages of an older torch, whose last entry is not marked": {
        0: [*coalesced(4, entry("send 0->1", 4, 7, p2p=1)), entry("barrier", 5)],
        1: [entry("all_reduce", 4, 7), entry("barrier", 5)],
        2: [entry("all_reduce", 4, 7), entry("barrier", 5)],
    },
    "in the middle of a coalesced block": {
        0: coalesced(1, entry("all_reduce", 1, 4), entry("all_reduce", 1, 5)),
        1: [entry("all_reduce", 1, 4)],
    },
    "all_to_all with splits": {rank: [entry("all_to_all", 1, 4 + rank, outputs=[[9 - rank]])] for rank in range(3)},
    "all_to_all of tensors": {
        rank: [entry("all_to_all", 1, inputs=[[rank + 1], [2]], outputs=[[1], [rank + 2]])] for rank in range(2)
    },
    "all_gather of uneven tensors, gloo": {
        rank: [entry("all_gather", 1, *UNEVEN[rank], outputs=UNEVEN, backend="gloo")] for rank in range(3)
    },
    "all_gather of uneven tensors, NCCL: broadcasts": {
        rank: coalesced(1, *(entry("_broadcast_oop", 1, *UNEVEN[each]) for each in range(3))) for rank in range(3)
    },
    "all_gather_v and reduce_scatter_v": {
        rank: [entry("all_gather_v", 1, rank + 1), entry("reduce_scatter_v", 2, 9, outputs=[[rank + 2]])]
        for rank in range(2)
    },
    "the root of a scatter, a gather": {
        rank: [
            entry("scatter", 1, inputs=[[2]], outputs=[[2], [2]] if rank == 0 else [[0]]),  # as NCCL records it
            entry("gather", 2, 4, outputs=[[4], [4]] if rank == 0 else []),
        ]
        for rank in range(2)
    },
    "the root of a scatter, gloo": {
        rank: [entry("scatter", 1, inputs=[[2], [2]] if rank == 0 else [], outputs=[[2]], backend="gloo")]
        for rank in range(2)
    },
    "as many elements in another shape": {0: [entry("all_reduce", 1, 2, 6)], 1: [entry("all_reduce", 1, 12)]},
    "called by two names": {
        0: [entry("_all_gather_base", 1, 4, frames=[(C10D, 1, "all_gather_into_tensor"), (HOME + "a.py", 1, "f")])],
        1: [entry("_all_gather_base", 1, 4, frames=[(C10D, 1, "all_gather_single"), (HOME + "a.py", 1, "f")])],
    },
    "a communicator that only some split": {
        0: [entry("split", 3, 1), entry("barrier", 4)],
        1: [entry("all_reduce", 3, 9), entry("barrier", 4)],
        2: [entry("all_reduce", 3, 9), entry("barrier", 4)],
    },
}


@pytest.mark.parametrize("case", ALIKE)
def test_equal_histories_have_no_difference(case: str) -> None:
    backend = "gloo" if "gloo" in case else "nccl"
    ranks = ALIKE[case]
    assert differ(ranks, backend=backend) is None
    if ranks:
        assert not [each for each in diagnose(stalled(ranks)) if each.certain]


@pytest.mark.parametrize("kept", [True, False])
def test_outputs_of_other_sizes_are_named(kept: bool) -> None:
    """Whether the last calls of a rank are also reported in full, with their inputs."""
    sizes = [4, 4, 2]
    seen = stalled({rank: [entry("_reduce_scatter_base", 1, 8, outputs=[[size]])] for rank, size in enumerate(sizes)})
    full = CallEvidence(group="0", seq=1, op="reduce_scatter_tensor", shapes=((8,),), done=True, backend="nccl")
    ranks = tuple(_with(rank, calls=(*rank.calls, *[full] * kept)) for rank in seen.ranks)
    found = [each for each in diagnose(_with(seen, ranks=ranks)) if each.certain]
    assert [(each.kind, each.ranks) for each in found] == [("shapes differ", (2,))]
    assert "rank 2 has [2], the other 2 have [4]" in found[0].text


def test_groups_are_compared_within_themselves() -> None:
    """Two groups with the same name, as from DeviceMesh, and two backends with the same name and separate numbers."""
    a, b = [entry("all_reduce", 1, 4, group="9")], [entry("broadcast", 1, 5, group="9")]
    ranks = {0: a, 1: a, 2: b, 3: b}
    seen = stalled(ranks)
    members = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    apart = tuple(
        _with(rank, groups=tuple(_with(group, name="9", ranks=members[rank.rank]) for group in rank.groups))
        for rank in seen.ranks
    )
    assert not [each for each in diagnose(_with(seen, ranks=apart)) if each.certain]
    assert [each.kind for each in diagnose(stalled(ranks, {"9": [0, 1, 2, 3]})) if each.certain] == ["wrong operation"]
    mixed = {
        0: [entry("all_reduce", 1, 4), entry("broadcast", 1, 9, backend="gloo")],
        1: [entry("broadcast", 1, 9, backend="gloo"), entry("all_reduce", 1, 4)],
    }
    assert not [each for each in diagnose(stalled(mixed)) if each.certain]


def _with(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


# -- texts of the verdicts


def verdict(ranks: Mapping[int, Sequence[Entry]]) -> Any:
    found = diagnose(stalled(ranks))
    assert found
    return found[0]


def test_a_broadcast_that_met_an_all_reduce() -> None:
    odd = replaced(REDUCE, entry("broadcast", 31, 10, line=6))
    found = verdict({0: REDUCE, 1: odd, 2: REDUCE, 3: REDUCE})
    assert (found.kind, found.ranks, found.certain) == ("wrong operation", (1,), True)
    assert found.text == (
        "rank 1 called broadcast at train.py:6 in main where the other 3 called all_reduce at train.py:12 in main (#31)"
    )
    assert "rank 1: broadcast #31 [10] float32 at train.py:6 in main" in found.details
    assert "rank 0: all_reduce #31 [10] float32 at train.py:12 in main" in found.details
    assert "NCCL does not compare what ranks call: all ranks continued, with wrong results since collective 31" in (
        found.details
    )


def test_another_shape_is_no_further_collective() -> None:
    odd = replaced(STEP, entry("all_reduce", 31, 5, line=11))
    found = verdict({0: STEP, 1: odd, 2: STEP, 3: STEP})
    assert (found.kind, found.ranks) == ("shapes differ", (1,))
    assert "all_reduce #31" in found.text
    assert "rank 1 has [5], the other 3 have [10]" in found.text


def test_later_calls_distinguish_a_skipped_from_an_additional_one() -> None:
    less = renumbered([*STEP[:20], *STEP[21:]])
    found = verdict({0: STEP, 1: less, 2: STEP})
    assert (found.kind, found.ranks) == ("skipped collective", (1,))
    assert "rank 1 skipped a collective that the other 2 called at train.py:12 in main: all_reduce #21" in found.text
    more = renumbered([*STEP[:20], entry("barrier", 0, inputs=[], line=99), *STEP[20:]])
    found = verdict({0: STEP, 1: more, 2: STEP})
    assert (found.kind, found.ranks) == ("skipped collective", (1,))
    assert "rank 1 called one more collective than the others, barrier #21 at train.py:99" in found.text


def test_a_difference_that_may_be_older_says_so() -> None:
    cut = [entry("all_reduce", seq, 10) for seq in range(25, 41)]
    odd = replaced(cut, entry("broadcast", 25, 10))
    details = verdict({0: cut, 1: odd, 2: cut}).details
    assert any(line.startswith("collectives before 25 are no longer recorded") for line in details)
    later = verdict({0: cut, 1: replaced(cut, entry("barrier", 26)), 2: cut}).details
    assert not any("not recorded" in line for line in later)
    kept_by_some = verdict({0: REDUCE, 1: cut, 2: replaced(REDUCE, entry("broadcast", 3, 10)), 3: REDUCE}).details
    assert "rank 1 no longer has a record of it" in kept_by_some


def test_a_difference_comes_before_uneven_data() -> None:
    """One rank has ended; the wait of the others is a consequence of collective 31."""
    odd = replaced(REDUCE, entry("broadcast", 31, 10, line=6))
    seen = stalled({0: [*REDUCE, entry("all_reduce", 41, 10)], 1: odd, 2: [*REDUCE, entry("all_reduce", 41, 10)]})
    ranks = tuple(_with(rank, ended=0) if rank.rank == 1 else rank for rank in seen.ranks)
    found = diagnose(_with(seen, ranks=ranks))
    assert found[0].kind == "wrong operation"
    assert not [each for each in found if each.kind == "uneven data"]


# -- size limits, and invalid data


def test_a_loop_is_small_and_its_frames_are_the_users() -> None:
    library = (DDP, 1884, "forward")
    deep = [(C10D, 1, "all_reduce"), library, *((HOME + f"deep{index}.py", index, "f") for index in range(40))]
    entries = [entry("all_reduce", seq, 10, frames=deep) for seq in range(1, 2001)]
    found = reply(entries)["history"]
    assert len(json.dumps(found)) < 24 * 1024
    assert len(found["signatures"]) == len(found["sites"]) == 1
    assert found["sites"][0][0][0] == DDP
    assert len(found["sites"][0]) == 8
    assert history(entries).groups[0].seqs == tuple(range(1, 2001))


def test_a_reply_that_is_too_large_drops_its_oldest_entries() -> None:
    entries = [entry("all_reduce", seq, 10_000_000 + seq, 77, 33, line=seq) for seq in range(1, 2001)]
    found = reply(entries)["history"]
    assert len(json.dumps(found)) <= kept.MAX_BYTES
    seqs = found["groups"][0]["seqs"]
    assert 100 < len(seqs) < 2000
    assert seqs == list(range(2001 - len(seqs), 2001))


def test_the_first_block_of_a_ring_that_has_wrapped_may_lack_its_beginning() -> None:
    block = coalesced(7, entry("all_reduce", 7, 4), entry("all_reduce", 7, 5))
    after = [entry("barrier", 8, inputs=[])]
    whole = [{**each, "record_id": index} for index, each in enumerate([*block, *after])]
    wrapped = [{**each, "record_id": index + 900} for index, each in enumerate([*block, *after])]
    assert history(whole).groups[0].seqs == (7, 7, 8)
    assert history(wrapped).groups[0].seqs == (8,)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no table": lambda _: "nonsense",
    "an index that is not there": lambda found: found["groups"][0]["kinds"].__setitem__(0, 99),
    "a negative index": lambda found: found["groups"][0]["kinds"].__setitem__(0, -1),
    "a site that is not there": lambda found: found["signatures"][0].update(site=5),
    "numbers without kinds": lambda found: found["groups"][0]["seqs"].append(41),
    "words for numbers": lambda found: found["groups"][0].update(seqs=["x"]),
    "frames that are none": lambda found: found.update(sites=[[1, 2]]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_records_that_do_not_fit_together_are_left_out(how: str) -> None:
    answer = reply(REDUCE)
    broken = BROKEN[how](answer["history"])
    answer["history"] = broken if isinstance(broken, str) else answer["history"]
    read = evidence_reply.read({**answer, "threads": [{"name": "m", "frames": [["a.py", 1, "f"]], "main": True}]})
    assert read.history == History()
    assert read.threads


# -- generated records

OPS = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base", "all_to_all", "barrier")


@st.composite
def programs(draw: st.DrawFn) -> list[Entry]:
    """Draw what all ranks call: a few kinds, in any order."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(OPS), st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=4)
    )
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=60))
    return [entry(op, seq, size, line=line) for seq, (op, size, line) in enumerate(order, 1)]


@settings(max_examples=40, deadline=None)
@given(programs(), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 60)), min_size=2, max_size=5))
def test_equal_records_have_no_difference(program: list[Entry], windows: list[tuple[int, int]]) -> None:
    """No matter how many records each rank still has, and how far it is."""
    ranks = {rank: program[begin : max(begin, end)] for rank, (begin, end) in enumerate(windows)}
    assert differ(ranks) is None


@settings(max_examples=40, deadline=None)
@given(st.data(), programs(), st.integers(3, 6))
def test_a_changed_call_is_found_at_its_place(data: st.DataObject, program: list[Entry], size: int) -> None:
    changed = data.draw(st.integers(1, len(program)))
    culprit = data.draw(st.integers(0, size - 1))
    old = program[changed - 1]
    ways: list[Entry] = [entry("reduce", changed, 3), {**old, "input_dtypes": ["Half"], "output_dtypes": ["Half"]}]
    if old["profiling_name"] in ("nccl:all_reduce", "nccl:broadcast", "nccl:_all_gather_base"):
        ways.append({**old, "input_sizes": [[77]]})
    odd = replaced(program, data.draw(st.sampled_from(ways)))
    ends = [data.draw(st.integers(changed, len(program))) for _ in range(size)]
    ranks = {rank: (odd if rank == culprit else program)[: ends[rank]] for rank in range(size)}
    found = differ(ranks)
    assert found is not None
    assert (found.seq, found.sides[0].ranks) == (changed, (culprit,))
    verdicts = diagnose(stalled(ranks))
    assert verdicts[0].ranks == (culprit,)
