"""`phalanx.init()` and `phalanx.main(train)`: the same script under any launcher, or none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import LINE
from phalanx.errors import PhalanxError, UsageError
from phalanx.train.elastic.halting import Halted
from phalanx.train.run import Run, trainings
from phalanx.worker import error_file
from phalanx.worker.process_group.ending import is_failure

Result = TypeVar("Result")


def init(
    backend: str | None = None,
    *,
    method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    timeout: float | timedelta = 300.0,
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
    run.training = next(trainings)
    return run


def main(train: Callable[[Run], Result], **options: Any) -> Result:
    """Call `train` with a Run, end that cleanly however it went, and return what `train` returned.

        phalanx.main(train, seed=3)     # options are those of `phalanx.init`

    What phalanx itself refuses (an option, a rank that is missing, a checkpoint) is told in words, and ends the process
    with the exit code that the command line has for it. Any other exception goes on as it is. Both are told to the
    launcher when they happen, not when the process has ended.
    """
    try:
        if not callable(train):
            raise UsageError(f"main takes the function itself, not {train!r}", fix="phalanx.main(train)")
        line = environment().get(LINE)
        return _survive(train, line, options) if line else _run(train, options)
    except PhalanxError as error:
        error_file.write(error)
        notes: list[str] = getattr(error, "__notes__", [])
        sys.stderr.write("\n  ".join([f"phalanx: {error}", *notes]) + "\n")
        raise SystemExit(error.exit_code) from error
    except Exception as error:
        error_file.write(error)
        raise


def _run(train: Callable[[Run], Result], options: dict[str, Any]) -> Result:
    run = init(**options)
    try:
        result = train(run)
        run.finish()
    except BaseException as error:
        _close_after(error, run)
        raise
    run.close()
    return result


def _survive(train: Callable[[Run], Result], line: str, options: dict[str, Any]) -> Result:
    """Under `phalanx run`, where somebody takes the place of a rank that has died."""
    from phalanx.train.elastic.elastic_loop import ElasticLoop

    generations = ElasticLoop(line, options)
    try:
        run, result = generations.live(train)
    except Halted:
        if generations.run is not None:
            generations.run.close(failed=True)  # nobody is to be waited for: what was saved is on the disk
        raise SystemExit(0) from None  # no part of the script that follows a training is meant
    except BaseException as error:
        if generations.run is not None:
            _close_after(error, generations.run)
        raise
    finally:
        generations.close()
    run.close()
    return result


def _close_after(error: BaseException, run: Run) -> None:
    """Whatever goes wrong here comes second: it is noted, and the first cause goes on."""
    if isinstance(error, Exception):
        error_file.write(error)
    failed = is_failure(error)  # sys.exit(0) is an end like any other
    try:
        run.close(failed=failed)
    except Exception as later:
        if not failed:
            raise
        error.add_note(f"and while the run was closed, {type(later).__name__}: {later}")
