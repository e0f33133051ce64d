"""Ranks as forks of the test, which share memory. Returns their results or exceptions."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.collectives import _native
from phalanx.collectives.engines import segment
from phalanx.collectives.engines.shm import ShmEngine
from phalanx.contract import shared_memory

LIMIT = 60.0  # seconds, for a busy machine


def ranks(
    size: int,
    body: Callable[[ShmEngine, int], Any],
    *,
    slot: int = segment.SLOT,
    direct: bool = True,
    names: Sequence[int] | None = None,
) -> list[Any]:
    """Return the result of `body` in each rank; for a killed one, the negative signal number."""
    fd = shared_memory.create("phalanx", _native.memory(size, slot))
    pids = mmap.mmap(-1, 4096)
    pipes = [os.pipe() for _ in range(size)]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be(fd, rank, size, body, pids, pipes[rank][1], {"slot": slot, "direct": direct}, names or range(size))
        children.append(child)
        os.close(pipes[rank][1])
    os.close(fd)
    for rank, child in enumerate(children):
        struct.pack_into("i", pids, 4 * rank, child)
    answers = [_answer(child, pipe[0]) for child, pipe in zip(children, pipes, strict=True)]
    failed = [answer.text for answer in answers if isinstance(answer, _Failed)]
    assert not failed, "\n".join(failed)
    return answers


class _Failed:
    def __init__(self, text: str) -> None:
        self.text = text


def _be(fd: int, rank: int, size: int, body: Any, shared: mmap.mmap, pipe: int, how: Any, names: Sequence[int]) -> None:
    signal.alarm(int(LIMIT))  # ends the process in any case
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    answer: Any
    try:
        while 0 in (pids := struct.unpack_from(f"{size}i", shared)):
            time.sleep(0.001)
        answer = body(ShmEngine(fd, rank, pids, names, LIMIT, **how), rank)
    except BaseException:  # the test must see any exception
        answer = _Failed(f"rank {rank}: {traceback.format_exc()}")
    with os.fdopen(pipe, "wb") as out:
        pickle.dump(answer, out)
    os._exit(0)


def _answer(child: int, pipe: int) -> Any:
    with os.fdopen(pipe, "rb") as coming:
        text = coming.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        return status
    return pickle.loads(text)
