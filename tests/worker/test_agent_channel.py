"""The channel between a worker and its agent. The test takes the part of the agent."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec

from phalanx.contract import encoding
from phalanx.contract.messages import worker_messages as messages
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.worker.agent_channel import AgentChannel, ChannelCallbacks

PLACEMENT = RankPlacement(rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, node_count=1)
FIRST = messages.Assignment(generation=0, placement=PLACEMENT, topology="", address="127.0.0.1", port=1)
LONG = 60.0  # seconds: a limit for hangs, not for slowness


@contextlib.contextmanager
def connected(leave: Callable[[], None] = lambda: None) -> Iterator[tuple[AgentChannel, socket.socket]]:
    """A channel that has received its first assignment, and the agent's end of it."""
    name = f"phalanx-test-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(LONG)
        agents: list[socket.socket] = []

        def assign() -> None:
            agents.append(listener.accept()[0])
            agents[0].send(encoding.encode(FIRST))

        assigning = threading.Thread(target=assign)
        assigning.start()
        callbacks = ChannelCallbacks(leave, lambda: None, lambda: messages.Heartbeat(0), lambda message: None)
        channel = AgentChannel(name, callbacks, hello=messages.Hello())
        assigning.join()
    (agent,) = agents
    threads = set(threading.enumerate())
    channel.listen()
    with agent:
        yield channel, agent
        channel.close()
        for thread in set(threading.enumerate()) - threads:
            thread.join(LONG)


def test_nothing_of_the_next_group_exists_before_the_old_one_is_cut() -> None:
    cutting, cut = threading.Event(), threading.Event()

    def leave() -> None:
        cutting.set()
        cut.wait(LONG)

    with connected(leave) as (channel, agent):
        assert not channel.has_moved(FIRST)
        agent.send(encoding.encode(msgspec.structs.replace(FIRST, generation=1)))
        assert cutting.wait(LONG)
        assert channel.generation == 0
        assert channel.newer(FIRST, 0.1) is None
        assert channel.has_moved(FIRST), "no step of the old group is committed any more"
        cut.set()
        newer = channel.newer(FIRST, LONG)
        assert newer is not None
        assert newer.generation == 1


def test_a_worker_waits_for_an_assignment_as_long_as_one_may_follow() -> None:
    with connected() as (channel, agent):
        assert channel.newer(FIRST, 0.01) is None
        agent.send(encoding.encode(messages.Wait()))
        agent.send(encoding.encode(msgspec.structs.replace(FIRST, generation=1)))
        newer = channel.newer(FIRST, LONG)
        assert newer is not None
        assert newer.generation == 1


def test_a_worker_waits_no_longer_if_a_rank_has_left_for_good() -> None:
    with connected() as (channel, agent):
        agent.send(encoding.encode(messages.NoRegroup()))
        assert channel.newer(FIRST, 1e6) is None
        assert not channel.has_moved(FIRST)
