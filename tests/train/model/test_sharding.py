"""What FSDP shards, and what it refuses: on two real ranks."""

from __future__ import annotations

import pytest

from tests.train.model.test_wrap import seen

pytestmark = [pytest.mark.xdist_group("wrap"), pytest.mark.warmed]  # they share a launch


def test_tensors_of_any_stride_are_sharded() -> None:
    for rank in seen():
        assert rank["strided"]["fsdp"] == pytest.approx(rank["strided"]["ddp"], rel=1e-4)


def test_the_shards_of_an_object_with_a_state_of_its_own_stay_shards() -> None:
    for rank in seen():
        assert "average.0.weight" in rank["average"]
        assert all(rank["average"].values())


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("scalar", ["temperature has no dimension", "shape ()", "torch.ones(1)"]),
        ("mixed", ["gathers 0 as one", "0.0.weight is float32, 0.5.weight is bfloat16", 'precision="bf16"']),
        ("copy", ["fsdp has sharded", "copy.deepcopy(model) before run.wrap"]),
    ],
)
def test_what_cannot_be_sharded_or_copied_is_named(what: str, texts: list[str]) -> None:
    for text in texts:
        assert text in seen()[0]["unshardable"][what]
