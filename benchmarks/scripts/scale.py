"""A rank of the real node of `phalanx bench scale`: accepts every assignment at once, and forms no group."""

from __future__ import annotations

import os
import signal
import threading

from phalanx.contract.messages import worker_messages as messages
from phalanx.contract.variables import LINE
from phalanx.worker.agent_channel import AgentChannel, ChannelCallbacks


def main() -> None:
    """Follow the agent until it ends this process."""
    over = threading.Event()
    moved = threading.Event()
    callbacks = ChannelCallbacks(
        leave=lambda: None,
        moved=moved.set,
        heartbeat=lambda: messages.Heartbeat(1),
        received=lambda message: over.set() if isinstance(message, messages.EndWorker) else None,
    )
    channel = AgentChannel(os.environ[LINE], callbacks, hello=messages.Hello())
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    channel.listen()
    while not over.is_set():
        moved.clear()
        generation = channel.generation
        channel.send(messages.Entering(generation, holds=True))
        channel.send(messages.FirstStep(generation, 1))
        while not over.is_set() and not moved.wait(0.5):
            pass


if __name__ == "__main__":
    main()
