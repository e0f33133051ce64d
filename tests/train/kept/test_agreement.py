"""Differences between ranks, and which of them are wrong: without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.errors import JoinError, PhalanxError, UsageError
from phalanx.train.kept.agreement import Agreement, describe_buffers, describe_model, disagreement

SAME = {"seed": "0", "model net weight": "(8, 4) float32", "data loader length": "240 samples"}


def test_ranks_that_agree() -> None:
    assert disagreement([SAME, dict(SAME), dict(SAME)]) is None
    assert disagreement([SAME]) is None


@pytest.mark.parametrize(
    ("change", "what", "detail", "fix"),
    [
        ({"seed": "3"}, "seeds", "seed: 0 on ranks 0, 1; 3 on rank 2", "the same seed on every rank"),
        (
            {"data loader length": "216 samples"},
            "data",
            "loader length: 240 samples on ranks 0, 1; 216 samples on rank 2",
            "run.loader divides",
        ),
        (
            {"model net weight": "(9, 4) float32"},
            "models",
            "net weight: (8, 4) float32 on ranks 0, 1; (9, 4) float32 on rank 2",
            "the same model",
        ),
        ({"kept scheduler": "StepLR"}, "kept objects", "scheduler: not there on ranks 0, 1; StepLR on rank 2", "keep"),
    ],
)
def test_what_differs_is_shown(change: dict[str, str], what: str, detail: str, fix: str) -> None:
    found = disagreement([SAME, SAME, SAME | change])
    assert found is not None
    error, wrong = found
    assert error.what == f"the ranks have different {what}"
    assert error.details == (detail,)
    assert fix in error.fix
    assert wrong == {0, 1, 2}  # no rank is known to be right


def test_ranks_that_differ_from_the_training_are_wrong() -> None:
    found = disagreement([SAME | {"seed": "1"}, SAME, SAME, SAME | {"seed": "2"}], reference=2)
    assert found is not None
    assert found[1] == {0, 3}


@pytest.mark.parametrize(
    ("reference", "rank", "kind", "message"),
    [
        (None, 0, UsageError, "the ranks have different models"),  # the first group: no rank is known to be right
        (None, 1, UsageError, "the ranks have different models"),
        (0, 0, JoinError, "rank 1 cannot take part: the ranks have different models"),
        (0, 1, UsageError, "the ranks have different models"),
    ],
)
def test_ranks_are_compared_when_a_group_forms(
    reference: int | None, rank: int, kind: type[PhalanxError], message: str
) -> None:
    models = [nn.Linear(2, 2 + each) for each in range(2)]
    descriptions = [{"seed": "0", "kept net": "Linear"} | describe_model(model, "net") for model in models]

    def gather(mine: object, **_: bool) -> list[Any]:
        if not isinstance(mine, list):
            return [mine, 0]  # checksums
        assert mine == [descriptions[rank], {}]
        return [[description, {}] for description in descriptions]

    group: Any = SimpleNamespace(world_size=2, rank=rank, seed=0, gather=gather)
    kept: Any = SimpleNamespace(objects={"net": models[rank]})
    with pytest.raises(kind) as caught:
        Agreement(kept, lambda: reference).compare_kept(group)
    assert caught.value.what == message


def test_a_message_has_the_first_differences() -> None:
    narrow, wide = (describe_model(nn.Sequential(*(nn.Linear(n, n) for _ in range(4))), "net") for n in (2, 3))
    found = disagreement([narrow, wide])
    assert found is not None
    assert len(found[0].details) == 5
    assert found[0].details[-1] == "and 4 more"


def test_a_parameter_that_only_some_ranks_train_is_shown_when_it_is_wrapped() -> None:
    model = nn.Linear(4, 2)
    kept, wrapped = describe_model(model, "net"), describe_model(model, "net", frozen=True)
    assert kept == wrapped
    model.weight.requires_grad_(False)
    assert describe_model(model, "net") == kept  # a script may unfreeze parameters later
    group = SimpleNamespace(
        world_size=2,
        rank=1,
        seed=0,
        gather=lambda mine, **_: [
            mine,
            [{**mine[0], "model Linear weight": "(2, 4) float32"}, {}] if mine.__class__ is list else 0,
        ],
    )
    with pytest.raises(UsageError, match="different models") as raised:
        Agreement(SimpleNamespace(objects={}), lambda: None).compare_model(group, model)  # type: ignore[arg-type]
    assert raised.value.details == ("Linear weight: (2, 4) float32, frozen on rank 0; (2, 4) float32 on rank 1",)


def unequal_buffers(models: list[nn.Module], reference: int | None) -> frozenset[str]:
    def compared(rank: int) -> frozenset[str]:
        def gather(mine: Any, **_: object) -> list[Any]:
            return [mine, 0] if mine.__class__ is int else [[mine[0], describe_buffers(model)] for model in models]

        group: Any = SimpleNamespace(world_size=len(models), rank=rank, seed=0, gather=gather)
        return Agreement(SimpleNamespace(objects={}), lambda: reference).compare_model(group, models[rank])  # type: ignore[arg-type]

    (found,) = {compared(rank) for rank in range(len(models))}
    return found


def test_buffers_that_only_some_ranks_have_are_found_in_a_group_that_forms_again() -> None:
    survivor, new = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert unequal_buffers([survivor, new], 0) == frozenset()
    survivor.register_buffer("cache", torch.ones(2), persistent=False)
    survivor.register_buffer("grown", torch.ones(8), persistent=False)
    new.register_buffer("grown", torch.ones(4), persistent=False)
    assert unequal_buffers([survivor, new, survivor], 0) == {"cache", "grown"}
    assert unequal_buffers([survivor, new], None) == frozenset()  # the first group: the script has made them differ


def test_a_lazy_parameter_has_no_shape_yet() -> None:
    assert describe_buffers(nn.LazyBatchNorm1d()) == {"num_batches_tracked": "() torch.int64"}
    assert describe_model(nn.LazyLinear(3), "net") == {}
