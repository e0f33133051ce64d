"""The loss that a script prints, in all usual forms; and text that is not a loss."""

from __future__ import annotations

import time

import pytest

from phalanx.launcher.telemetry.loss_parser import LossParser, ParsedLoss, parse

BAR = "Epoch 3:  12%|█▏        | 120/1000 [00:12<01:28,  9.94it/s, loss=0.123, v_num=3]"

PRINTED: dict[str, ParsedLoss] = {
    "loss 0.12": ParsedLoss({"loss": 0.12}),
    "loss: 0.12": ParsedLoss({"loss": 0.12}),
    "loss=0.12": ParsedLoss({"loss": 0.12}),
    "Loss 1.2e-3": ParsedLoss({"loss": 1.2e-3}),
    "LOSS = -.5": ParsedLoss({"loss": -0.5}),
    "train_loss 0.12": ParsedLoss({"loss": 0.12}),
    "train/loss: 0.12": ParsedLoss({"loss": 0.12}),
    "the loss is 0.12.": ParsedLoss({"loss": 0.12}),
    "loss: tensor(0.1200, grad_fn=<MseLossBackward0>)": ParsedLoss({"loss": 0.12}),
    "loss nan": ParsedLoss({"loss": None}),
    "loss: inf, lr 0.1": ParsedLoss({"loss": None}),
    "{'loss': 0.34, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 2.5}": ParsedLoss({"loss": 0.34}, epoch=2),
    '{"step": 7, "loss": 0.34}': ParsedLoss({"loss": 0.34}, step=7),
    "step 12/100 loss 0.12": ParsedLoss({"loss": 0.12}, step=12, total=100),
    "epoch 2/10  step 12/100 (12%)  loss 0.3021  61 samples/s": ParsedLoss({"loss": 0.3021}, 12, 2, 100),
    "iter 10: loss 3.4012, time 2.1ms": ParsedLoss({"loss": 3.4012}, step=10),
    "step 250: train loss 2.1, val loss 2.2": ParsedLoss({"loss": 2.1, "val_loss": 2.2}, step=250),
    "global_step=8, validation_loss=0.5": ParsedLoss({"val_loss": 0.5}, step=8),
    " iteration       10/     500 | lm loss: 1.06E+01 | loss scale: 1.0 |": ParsedLoss({"loss": 10.6}, 10, total=500),
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.281021": ParsedLoss({"loss": 2.281021}, epoch=1),
    "Epoch: [4][ 10/5005]\tTime 0.5 (0.6)\tLoss 6.9e+00 (7.1e+00)": ParsedLoss({"loss": 6.9}, epoch=4),
    "12/100 [==>...] - 1s 3ms/step - loss: 0.3 - accuracy: 0.9": ParsedLoss({"loss": 0.3}),
    "loss_cls: 0.3, loss_bbox: 0.2, loss: 0.5": ParsedLoss({"loss": 0.5}),
    BAR: ParsedLoss({"loss": 0.123}, epoch=3, bar=120),
    "Epoch 3": ParsedLoss(epoch=3),
}

NO_LOSS = (
    "no loss",
    "no loss 0",
    "loss function: mse",
    "loss function 2",
    "using loss CrossEntropyLoss()",
    "MSELoss 3",
    "glossy 3, floss 0.2, lossless 1",
    "packet loss 0.5%",
    "packet loss: 12",
    "loss 5 %",
    "weight loss: 3",
    "loss 3x smaller",
    "loss took 0.3s",
    "loss 1.2.3",
    "loss on 2024-01-01",
    "loss 2024-01-01",
    "loss 12/100",
    "the loss of 3 nodes",
    "",
)


@pytest.mark.parametrize("line", PRINTED, ids=range(len(PRINTED)))
def test_usual_lines(line: str) -> None:
    assert parse(line) == PRINTED[line]


@pytest.mark.parametrize("line", NO_LOSS, ids=range(len(NO_LOSS)))
def test_false_friends(line: str) -> None:
    assert parse(line).values == {}


def test_a_stream_is_read_as_it_grows() -> None:
    gauge = LossParser()
    assert gauge.feed(b"Epoch 2\nlos") is None
    assert gauge.feed(b"s 0.5") is None  # the number may be incomplete
    assert gauge.feed(b"1\nnothing\n") == ParsedLoss({"loss": 0.51}, epoch=2)
    bar = "\r".join(f"{n}%|# | {n}/100 [00:01, loss=0.{n}]" for n in (1, 2, 3)).encode()
    assert gauge.feed(b"\x1b[32m" + bar) == ParsedLoss({"loss": 0.2}, epoch=2, bar=2)
    assert gauge.feed(b"\n") == ParsedLoss({"loss": 0.3}, epoch=2, bar=3)
    assert gauge.feed(b"loss 0.1\nval_loss 0.2\n") == ParsedLoss({"loss": 0.1, "val_loss": 0.2}, epoch=2)
    assert gauge.feed(b"\xff" * 100_000 + b" loss 3\n") == ParsedLoss({"loss": 3.0}, epoch=2)


def test_what_was_left_out_is_not_made_up() -> None:
    gauge = LossParser()
    assert gauge.feed(b"step 9 loss 0.2") is None
    assert gauge.feed(b"5 of val_loss 7\nloss 0.1\nloss 3", skipped=True) == ParsedLoss({"loss": 0.1})
    assert gauge.feed(b"1\n") == ParsedLoss({"loss": 31.0})


@pytest.mark.parametrize("more", [b" " * 4000, b"1" * 4000 + b"x", b"= " * 2000, b"\t" * 2000 + b"is" + b" " * 2000])
def test_every_line_is_parsed_quickly(more: bytes) -> None:
    then = time.process_time()
    assert LossParser().feed((b"loss " + more + b"\n") * 8) is None
    assert time.process_time() - then < 1.0, "20 ms on a machine that does nothing else; it was 10 s"


def test_steps_that_begin_again_with_every_epoch_are_none() -> None:
    gauge = LossParser()
    assert gauge.feed(b"epoch 0 step 90/100 loss 1\n") == ParsedLoss({"loss": 1.0}, 90, 0, 100)
    assert gauge.feed(b"epoch 1 step 5/100 loss 1\n") == ParsedLoss({"loss": 1.0}, epoch=1)
    assert gauge.feed(b"epoch 1 step 15/100 loss 1\n") == ParsedLoss({"loss": 1.0}, epoch=1)
