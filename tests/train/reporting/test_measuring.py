"""Reports of rank 0 to its agent: rare, in numbers, and without delaying a step."""

from __future__ import annotations

import socket

import torch

from phalanx.contract import encoding
from phalanx.contract.messages import worker_messages as words
from phalanx.train.reporting.measuring import Measuring
from phalanx.worker.agent_channel import AgentChannel


def test_at_most_a_few_steps_per_second_are_reported_and_always_the_last() -> None:
    sent: list[words.MeasuredStep] = []
    now = [0.0]
    measuring = Measuring(sent.append, 5000, clock=lambda: now[0])
    for step in range(1, 1001):
        now[0] = step / 100
        measuring.advance(step, 2, {"loss": 1 / step, "odd": float("inf")}, epochs=9)
    assert 45 <= len(sent) <= 51
    measuring.close()
    measuring.close()
    assert sent[-1] == words.MeasuredStep(step=1000, epoch=2, epochs=9, total=5000, values={"loss": 0.001, "odd": None})
    assert len({one.step for one in sent}) == len(sent)


def test_what_is_logged_is_reported_with_its_own_step_before_the_next_one_or_after_a_while() -> None:
    sent: list[words.MeasuredStep] = []
    now = [0.0]
    measuring = Measuring(sent.append, None, clock=lambda: now[0])
    measuring.advance(1, 0, {"loss": 0.5})
    measuring.log(1, 0, {"accuracy": 0.8})
    measuring.log(1, 0, {"accuracy": 0.9})
    now[0] = 1.0
    measuring.advance(2, 0, {"loss": 0.4})
    measuring.log(2, 1, {"accuracy": 1.0})
    now[0] = 2.0
    measuring.log(2, 1, {"accuracy": 1.1})  # nothing was sent for a while
    assert [(one.step, one.values) for one in sent] == [
        (1, {"loss": 0.5}),
        (1, {"accuracy": 0.9}),
        (2, {"loss": 0.4}),
        (2, {"accuracy": 1.1}),
    ]
    measuring.log(2, 1, {"accuracy": torch.tensor(1.2)})
    now[0] = 3.0
    measuring.log(2, 1, {"lr": 0.1})  # would wait for a GPU
    assert len(sent) == 4
    measuring.close()
    assert sent[-1].values.keys() == {"accuracy", "lr"}


def test_what_other_ranks_have_logged_does_not_let_the_steps_decrease() -> None:
    sent: list[words.MeasuredStep] = []
    now = [0.0]
    measuring = Measuring(sent.append, None, clock=lambda: now[0])
    measuring.advance(5, 0, {"loss": 0.5})
    for late in (1, 2):
        now[0] += 1.0
        measuring.log(late, 0, {"heat/rank 1": 71.0})
    measuring.log(6, 0, {"accuracy": 0.5})
    measuring.advance(7, 0, {"loss": 0.4})
    measuring.close()
    assert [one.step for one in sent] == [5, 5, 5, 6, 7]


def test_the_first_step_of_an_epoch_is_reported_soon() -> None:
    """The last report of a stalled rank is shown during the stall."""
    sent: list[words.MeasuredStep] = []
    now = [0.0]
    measuring = Measuring(sent.append, None, clock=lambda: now[0])
    for step, when, epoch in ((1, 1.0, 1), (2, 1.02, 2), (3, 1.06, 2), (4, 1.08, 2), (5, 1.1, 3), (6, 1.12, 3)):
        now[0] = when
        measuring.advance(step, epoch, {"loss": torch.tensor(0.5)}, epochs=9)
    assert [(one.step, one.epoch) for one in sent] == [(1, 1), (3, 2), (6, 3)]


def test_a_gpu_value_is_read_only_after_a_synchronization() -> None:
    sent: list[words.MeasuredStep] = []
    now = [0.0]
    measuring = Measuring(sent.append, None, clock=lambda: now[0])
    for step in range(1, 901):
        now[0] = step / 100
        # Like a result of `held` for a value on a GPU.
        measuring.advance(step, 0, {"loss": torch.tensor(step)}, waited=step <= 500 and step % 100 == 0)
    assert [one.step for one in sent] == [1, 100, 200, 300, 400, 500, 700, 900]
    assert sent[-1] == words.MeasuredStep(step=900, values={"loss": 900.0})


def test_no_packet_exceeds_the_limit() -> None:
    sent: list[words.MeasuredStep] = []
    measuring = Measuring(sent.append, None)
    measuring.advance(1, 0, {f"{'long' * 1000}{number}": 0.1 for number in range(5000)})
    measuring.advance(2, 0, {f"{number}{'long' * 1000}": 0.1 for number in range(5000)})
    measuring.close()
    assert [len(encoding.encode(one)) < encoding.PACKET_LIMIT for one in sent] == [True, True]
    assert len(sent[1].values) == 64


def test_an_agent_that_does_not_read_delays_no_rank() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = AgentChannel.__new__(AgentChannel)
    channel._sock = ours
    with ours, theirs:
        for step in range(10_000):
            channel.send_nowait(words.MeasuredStep(step=step, values={"loss": 0.5}))
        channel.send_nowait(words.MeasuredStep(step=0, values={"\udc80": 0.5}))  # no text at all
        received = words.from_worker.decode(theirs.recv(encoding.PACKET_LIMIT))
    assert received == words.MeasuredStep(step=0, values={"loss": 0.5})
