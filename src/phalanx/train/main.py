"""`phalanx.init()` and `phalanx.main(train)`: the same script under any launcher, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.train.run import Run


def init(
    backend: str | None = None,
    *,
    method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    timeout: float = 300.0,
    seed: int = 0,
    device: Any = None,
) -> Run:
    """Find out who this process is, meet the others, and hold what a training needs."""
    run = Run.join(
        backend,
        method=method,
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timeout,
        seed=seed,
        device=device,
    )
    run.seed_everything()
    return run


def main(train: Callable[[Run], object], **options: Any) -> None:
    """Run `train` with a Run, resume where a checkpoint left off, and end cleanly; options are those of `init`."""
    with init(**options) as run:
        train(run)
