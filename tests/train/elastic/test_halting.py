"""Ranks that run at different speeds halt at the same step; none waits for one that has halted."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading

import pytest

from phalanx.contract import encoding
from phalanx.contract.messages import worker_messages as words
from phalanx.train.elastic.halting import Halting
from phalanx.train.elastic_loop import ElasticLoop
from phalanx.worker.process_group import nccl
from tests.kit.cli import until

RANKS = 4


class Rank(threading.Thread):
    """Steps together with the others, as with collectives; the pace differs between ranks."""

    def __init__(self, together: threading.Barrier, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.steps = 0
        self.halting = Halting(lambda: self.steps)
        self._together = together
        self._pauses = [chance.choice((0.0, 0.0, 0.0005)) for _ in range(50)]

    def run(self) -> None:
        for pause in itertools.cycle(self._pauses):
            self._together.wait(60)
            threading.Event().wait(pause)
            self.steps += 1
            if self.halting.reached(self.steps, lambda: False):
                return


@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_halt_at_the_same_step(seed: int) -> None:
    chance = random.Random(seed)
    together = threading.Barrier(RANKS)
    ranks = [Rank(together, chance) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()
    until(lambda: ranks[0].steps >= seed, 60, "some steps to be made")
    standing = [rank.halting.ask() for rank in chance.sample(ranks, RANKS)]
    goal = max(standing) + 1
    for rank in chance.sample(ranks, RANKS):
        threading.Event().wait(chance.choice((0.0, 0.002)))
        rank.halting.settle(goal)
    for rank in ranks:
        rank.join(60)
        assert not rank.is_alive()
    assert [rank.steps for rank in ranks] == [goal] * RANKS
    assert goal - min(standing) <= 2


def test_a_rank_that_waits_to_halt_notices_a_new_group() -> None:
    elsewhere = threading.Event()
    halting = Halting(lambda: 3)
    assert not halting.reached(3, elsewhere.is_set)  # no halt was requested
    assert halting.ask() == 3
    assert not halting.reached(3, elsewhere.is_set)  # one more step is allowed
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(halting.reached(4, elsewhere.is_set)))
    waiting.start()
    elsewhere.set()
    halting.stir()
    waiting.join(60)
    assert found == [False]


def test_a_rank_without_a_step_answers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until there are enough workers; the thread that reports must not wait as well."""
    for variable in nccl.VARIABLES:
        monkeypatch.setenv(variable, "0")
    name = f"phalanx-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"\0{name}")
        server.listen()
        made: list[ElasticLoop] = []
        worker = threading.Thread(target=lambda: made.append(ElasticLoop(name, {})))
        worker.start()
        line, _ = server.accept()
        with line:
            line.settimeout(10)
            line.send(encoding.encode(words.Wait()))
            line.send(encoding.encode(words.Halt()))
            while not isinstance(answer := words.from_worker.decode(line.recv(encoding.PACKET_LIMIT)), words.HaltAck):
                pass
            assert answer == words.HaltAck(0, -1)
            worker.join(10)
            made[0].close()
            for thread in threading.enumerate():
                if thread.name == "phalanx-line":
                    thread.join(10)
