"""Which rank hands over which state, and how it is transferred."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import JoinError, LaunchError, UsageError
from phalanx.train.data.rng import FreshRng
from phalanx.train.elastic import staged_copies, tensor_transfer
from phalanx.train.elastic.handover import HandoverPlan
from phalanx.train.elastic.made_once import MadeOnce
from phalanx.train.elastic.memfd_tensors import MemfdTensors, OpenedMemfd, PackingThread
from phalanx.train.elastic.shard_handover import ShardHandoverPlan, divided
from phalanx.train.elastic.state_offer import StateOffer, offers
from tests.kit.cli import until

CPU = torch.device("cpu")


def word(step: int, epoch: int = 0) -> str:
    return StateOffer(step, epoch, {}).encoded


@pytest.mark.parametrize(
    ("steps", "holders", "lacking"),
    [
        ([None, None], (), ()),
        ([5, 5, 5], (0, 1, 2), ()),
        ([5, None, 5], (0, 2), (1,)),
        ([4, 5, None], (1,), (0, 2)),
        ([0, None], (0,), (1,)),
    ],
)
def test_the_newest_wins(steps: list[int | None], holders: tuple[int, ...], lacking: tuple[int, ...]) -> None:
    deal = HandoverPlan.of(["" if step is None else word(step) for step in steps], [range(len(steps))])
    assert (deal.holders, deal.lacking) == (holders, lacking)


def test_who_is_in_the_next_epoch_is_further_than_who_ends_this_one() -> None:
    deal = HandoverPlan.of([word(5, 0), word(5, 1), word(4, 1)], [range(3)])
    assert (deal.holders, deal.lacking) == ((1,), (0, 2))


def test_states_come_from_the_same_node_if_possible() -> None:
    deal = HandoverPlan.of([word(5), word(5), "", word(5), "", ""], [(0, 1, 2), (3,), (4, 5)])
    assert [deal.near(rank) for rank in deal.lacking] == [(0, 1), (), ()]
    assert [deal.giver(rank) for rank in deal.lacking] == [0, 1, 3]


@pytest.mark.parametrize(
    ("words", "holders"),
    [
        (["[5,1,[0,2],0,false]", "[5,0,[1,2],0,false]"], {0: 0, 1: 1}),
        (["[5,0,[0,2],0,false]", "[4,0,[1,2],0,false]"], None),
        (["[5,0,[0,2],0,false]", ""], None),
        (["[5,0,[1,2],0,false]", "[5,0,[0,2],0,false]"], {0: 1, 1: 0}),
        (["[5,0,[0,3],0,false]", "[5,0,[1,3],0,false]"], None),
        (["[5,0,[-1,0],0,false]", "[5,0,[-1,0],0,false]"], None),  # in an unknown layout
        (["[5,0,null,0,false]", "[5,0,[0,1],0,false]"], {1: 0}),
        # replicas: one of each shard is enough, and the newest step that has them all counts
        (["[5,0,[0,2],0,false]", "[5,0,[1,2],0,false]", "[5,0,[0,2],0,false]", ""], {0: 0, 1: 1, 2: 0}),
        (["[5,0,[0,2],0,false]", "", "[5,0,[0,2],0,false]", ""], None),
        (["[6,0,[0,2],0,false]", "[5,0,[1,2],0,false]", "[5,0,[0,2],0,false]", ""], {1: 1, 2: 0}),
        (["[6,0,[0,2],0,false]", "[6,0,[1,2],0,false]", "[5,0,[0,2],0,false]", "[5,0,[1,2],0,false]"], {0: 0, 1: 1}),
        # a rank that is prepared counts for the next step, if another has committed it
        (["[6,0,[0,2],0,false]", "[5,0,[1,2],0,true]", "", ""], {0: 0, 1: 1}),
        (["[5,0,[0,2],0,true]", "[5,0,[1,2],0,true]", "", ""], {0: 0, 1: 1}),
        (["[6,0,[0,2],0,false]", "[5,0,[1,2],0,false]", "", "[5,0,[1,2],0,true]"], {0: 0, 3: 1}),
        (["[7,0,[0,2],0,false]", "[5,0,[1,2],0,true]", "", ""], None),
    ],
)
def test_each_shard_needs_a_holder(words: list[str], holders: dict[int, int] | None) -> None:
    nodes = [range(len(words))]
    deal = ShardHandoverPlan.of(offers(words), nodes)
    assert (deal.holders if deal is not None else None) == holders
    assert not HandoverPlan.of(words, nodes).holders


def test_a_shard_comes_from_a_replica_near_by() -> None:
    deal = ShardHandoverPlan(5, 2, {0: 0, 1: 1, 2: 0, 5: 1, 6: 0}, [(0, 1, 2, 3), (4, 5, 6, 7)], 8)
    assert deal.lacking == (3, 4, 7)
    assert deal.keeps((0, 1) * 4)
    assert deal.givers((0, 1) * 4) == {3: 1, 4: 6, 7: 5}
    assert deal.senders() == (0, 1)
    # Another number of shards, another layout, or not known yet: any rank can describe the state.
    assert not deal.keeps((0, 1, 2, 3) * 2)
    assert not deal.keeps((0, 0, 1, 1) * 2)
    assert not deal.keeps(None)
    assert deal.givers(None) == {3: 0, 4: 5, 7: 6}


def test_a_tensor_is_divided_as_fsdp_divides_it() -> None:
    whole = torch.arange(10).view(5, 2)
    assert [part.tolist() for part in divided(whole, 4, 0)] == [
        list(part.tolist()) for part in (whole[:2], whole[2:4], whole[4:], whole[5:])
    ]
    assert [part.shape[1] for part in divided(whole, 2, 1)] == [1, 1]
    assert [part.shape[0] for part in divided(whole, 6, 0)] == [1, 1, 1, 1, 1, 0]


def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    large = torch.randn(700, 700, generator=chance)
    return {
        "large": large,
        "half": large[:3].to(torch.bfloat16),
        "turned": large[:40, :30].t(),
        "one": torch.tensor(7),
        "none": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
        "double": large[0].double(),
    }


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in tensors().items()}


def alike(found: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, found[name]) for name, one in tensors().items())


def test_staged_copies_write_and_read_any_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_copies, "BUFFER", 1 << 18)  # the large one takes several pieces
    places, end = {}, 64
    for name, one in tensors().items():
        places[name] = end
        end += one.nbytes + -one.nbytes % 64
    fd = os.memfd_create("staged")
    try:
        os.ftruncate(fd, end)
        staged_copies.write(fd, [(one, places[name]) for name, one in tensors().items()])
        found = blank()
        found["turned"] = torch.zeros(40, 30).t()  # not contiguous
        staged_copies.read(fd, [(one, places[name]) for name, one in found.items()])
        assert alike(found)
        with pytest.raises(JoinError, match="ends in the middle of a tensor"):
            staged_copies.read(fd, [(found["large"], end - 64)])
    finally:
        os.close(fd)


def test_an_offer_contains_what_was_put_in() -> None:
    offer = MemfdTensors(tensors(), {"step": 3})
    found = blank()
    with OpenedMemfd(offer.address) as opened:
        assert opened.label["step"] == 3
        opened.read(found)
        own = {name: opened.tensor(name, one.dtype, tuple(one.shape)) for name, one in tensors().items()}
        opened.read(own)
    assert alike(found)
    assert alike(own)
    offer.close()
    own["large"] += 1  # it lives as long as someone has it
    assert torch.equal(own["large"], found["large"] + 1)
    with pytest.raises(LaunchError, match="cannot be read"):
        OpenedMemfd(offer.address)
    with open(os.devnull, "r+b") as foreign, pytest.raises(LaunchError, match="not the state of a training"):
        OpenedMemfd(f"{os.getpid()} {foreign.fileno()} 0 9")


def exchanged(rank: int) -> bool:
    found = blank()
    if rank == 0:
        tensor_transfer.send(tensors(), 1)
        return True
    tensor_transfer.receive(found, 0)
    return alike(found)


def between_two() -> bool:
    import torch.distributed as dist

    return exchanged(dist.get_rank())


def test_by_the_backend_in_few_pieces() -> None:
    assert phalanx.spawn(between_two, ranks=2) == [True, True]
    sizes = {**dict.fromkeys(map(str, range(1000)), 1000), "large": tensor_transfer.SMALL, "empty": 0}
    together = [*tensor_transfer.together(sizes)]
    assert len(together) == 2
    assert sorted(name for names in together for name in names) == sorted(name for name in sizes if sizes[name])


def model() -> nn.Module:
    return nn.Linear(3, 3)


def other() -> nn.Module:
    return nn.Linear(2, 2)


def test_once_gives_the_same_object_and_the_same_numbers() -> None:
    once = MadeOnce()

    def entered(*makes: Callable[[], Any]) -> tuple[list[Any], float, float]:
        torch.manual_seed(1)
        random.seed(1)
        once.enter()
        things = [once.get(make, CPU) for make in makes]
        return things, torch.rand(1).item(), random.random()

    first = entered(model, other)
    again = entered(model, other)
    assert [one is two for one, two in zip(first[0], again[0], strict=True)] == [True, True]
    assert first[1:] == again[1:]
    with pytest.raises(UsageError, match=r"call 1 of once\(\) is once.*, but was once"):
        entered(other)


def test_once_refuses_what_belongs_to_one_group() -> None:
    run = phalanx.Run(phalanx.init(device="cpu"))
    try:
        with pytest.raises(UsageError, match="made a Loader, which belongs to one process group"):
            MadeOnce().get(lambda: (model(), run.loader([1, 2], batch_size=1)), CPU)
    finally:
        run.group.close()


def test_once_and_on_resize_want_functions() -> None:
    run = phalanx.Run(phalanx.init(device="cpu"))
    try:
        with pytest.raises(UsageError, match="given a Linear, expected a function"):
            run.once(model())  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="given a tuple, expected a function"):
            run.once((model(), 1))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="given a NoneType, expected a function of two numbers"):
            run.group.on_resize(None)  # type: ignore[arg-type]
        run.keep(model=model())
        with pytest.raises(UsageError, match="called after keep"):
            run.group.on_resize(lambda before, now: None)
    finally:
        run.group.close()


def test_numbers_are_begun_again_where_steps_draw_them() -> None:
    def steps(fresh: FreshRng, values: list[int]) -> list[float]:
        found = []
        for value in values:
            fresh.begin(value, CPU)
            found.append(random.random())
            fresh.settle()
        return found

    random.seed(5)
    first = FreshRng()
    whole = steps(first, [1, 2, 3])
    later = FreshRng()
    later.drawn = first.drawn
    assert first.drawn == ["python"]
    random.seed(9)
    assert steps(later, [2, 3]) == whole[1:]


def test_a_state_that_cannot_be_written_is_reported_to_the_rank_that_waits() -> None:
    def fill() -> MemfdTensors:
        raise ValueError("no memory")

    packing = PackingThread(fill)
    with pytest.raises(ValueError, match="no memory"):
        packing.result()
    packing.close()


def test_a_state_that_is_closed_before_it_is_filled_is_closed_then() -> None:
    begun, made = threading.Event(), list[MemfdTensors]()

    def fill() -> MemfdTensors:
        begun.wait(10)
        made.append(MemfdTensors(tensors(), {}))
        return made[0]

    packing = PackingThread(fill)
    packing.close()
    begun.set()
    packing.result()
    until(lambda: made[0]._fd < 0, 10, "it to be closed")
