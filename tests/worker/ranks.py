"""Ranks on one machine, started by hand: `RANK=… WORLD_SIZE=… MASTER_PORT=… python WORDS`."""

from __future__ import annotations

from collections.abc import Sequence

from tests.kit import imported
from tests.kit.cli import PYTHON, Env, Handle, free_port, start


def ranks(count: int, *words: str, each: Sequence[Sequence[str]] = (), env: Env | None = None) -> list[Handle]:
    """Start ranks, rank 0 last. `each`: additional words for each rank."""
    base = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(count),
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    own = each or [()] * count
    return [plain(*words, *own[rank], env={**base, "RANK": str(rank)}) for rank in reversed(range(count))][::-1]


def plain(*words: str, env: Env | None = None) -> Handle:
    """Start `python WORDS`. If the test has the mark `imported`, torch is already imported."""
    return imported.start(*words, env=env) if imported.in_use() else start(words=(*PYTHON, *words), env=env)


def ended(jobs: Sequence[Handle], timeout: float = 120) -> str:
    """Wait until all ranks end with success. Return their output."""
    codes = [job.wait(timeout) for job in jobs]
    text = "\n".join(job.both for job in jobs)
    assert codes == [0] * len(jobs), text
    assert all(job.err == "" for job in jobs), text  # no warnings, of torch or phalanx
    return text
