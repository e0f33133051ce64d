"""Ranks of one machine, started by hand: `RANK=… WORLD_SIZE=… MASTER_PORT=… python WORDS`."""

from __future__ import annotations

from collections.abc import Sequence

from tests.kit import imported
from tests.kit.cli import PYTHON, Env, Handle, free_port, start


def ranks(count: int, *words: str, each: Sequence[Sequence[str]] = (), env: Env | None = None) -> list[Handle]:
    """Rank 0 is started last; `each`: more words for each."""
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
    """`python WORDS`; with torch imported already, where the test is marked so."""
    return imported.start(*words, env=env) if imported.in_use() else start(words=(*PYTHON, *words), env=env)


def ended(jobs: Sequence[Handle], timeout: float = 120) -> str:
    """What all of them wrote, once they are at a good end."""
    codes = [job.wait(timeout) for job in jobs]
    text = "\n".join(job.both for job in jobs)
    assert codes == [0] * len(jobs), text
    assert all(job.err == "" for job in jobs), text  # no warning of torch's, or of ours
    return text
