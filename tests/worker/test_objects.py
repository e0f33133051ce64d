"""Values that are sent between ranks: plain data and tensors, and nothing that could be code."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx.errors import UsageError
from phalanx.worker.process_group import objects
from phalanx.worker.process_group.seeds import RankGenerator, derive, seed_all


@pytest.mark.parametrize(
    "obj",
    [
        None,
        True,
        -5,
        1 << 63,
        2.5,
        "text",
        b"\0\xff",
        [1, [2, {"a": None}]],
        (1, ("a", (None,)), [()]),
        {"a": 1, 2: "b"},
        {},
    ],
)
def test_plain_objects(obj: Any) -> None:
    assert objects.decode(objects.encode(obj)) == obj


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    found = objects.decode(objects.encode({"w": [tensor]}))["w"][0]
    assert (found.dtype, found.shape, found.device) == (dtype, tensor.shape, tensor.device)
    assert torch.equal(found, tensor)


def test_a_view_is_sent_as_it_looks() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    found = objects.decode(objects.encode(tensor))
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]
    found += 1  # a copy that the receiver may change
    assert not found.requires_grad


def test_conjugated_tensors_are_sent() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert torch.equal(objects.decode(objects.encode(tensor)), tensor)
    assert objects.decode(objects.encode(tensor.imag)).tolist() == [-2]


def test_the_state_of_a_module() -> None:
    state = torch.nn.Linear(2, 1).state_dict()  # an OrderedDict, which has more than its items
    found = objects.decode(objects.encode(state))
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("obj", "seen"),
    [
        (Path("x"), "the object is a pathlib.PosixPath"),
        ({"a": [1, object()]}, "the object['a'][1] is a builtins.object"),
        ({1, 2}, "builtins.set"),
        ({(1, 2): 3}, "a key of the object is a tuple"),
        (1 << 70, "too large"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_objects_that_cannot_be_sent_are_refused(obj: Any, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        objects.encode(obj)
    assert seen in str(caught.value)


def test_an_object_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="contains itself"):
        objects.encode(endless)


def test_a_shape_without_data_allocates_nothing() -> None:
    head = msgspec.msgpack.encode(["float32", [1 << 40], False])
    hostile = msgspec.msgpack.Ext(objects.TENSOR, struct.pack("<I", len(head)) + head)
    with pytest.raises(ValueError, match="without data"):
        objects.decode(msgspec.msgpack.encode(hostile))


def test_a_pickle_is_not_opened() -> None:
    with pytest.raises(Exception, match=r"MessagePack|malformed|truncated|trailing"):
        objects.decode(pickle.dumps({"a": 1}))


def test_seeds() -> None:
    # Fixed values: the order of samples in a checkpoint depends on them.
    assert derive(0, "data", 3) == derive(0, "data", 3) != derive(0, "data", 4)
    assert 0 <= derive(7) < 1 << 63
    seed_all(derive(1, "rank", 0))
    first = torch.rand(3)
    seed_all(derive(1, "rank", 1))
    assert not torch.equal(first, torch.rand(3))
    seed_all(derive(1, "rank", 0))
    assert torch.equal(first, torch.rand(3))


def test_the_generator_of_a_rank() -> None:
    def draw(own: RankGenerator) -> float:
        return torch.rand(1, generator=own.get()).item()

    own, same, other = RankGenerator(1, 0), RankGenerator(1, 0), RankGenerator(1, 1)
    first = draw(own)
    assert first == draw(same) != draw(other)
    assert draw(own) == draw(same) != first
    own.seed(7)
    same.seed(7)
    assert own.get() is own.get()
    assert draw(own) == draw(same) != draw(own)
