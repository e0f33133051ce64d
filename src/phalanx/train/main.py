"""`phalanx.init()` and `phalanx.main(train)`: the same script under any launcher, or without one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import LINE
from phalanx.errors import PhalanxError, UsageError
from phalanx.train import wrong_calls
from phalanx.train.elastic.halting import Halted
from phalanx.train.reporting.trackers import LogTo, close_all, trackers
from phalanx.train.run import Run
from phalanx.worker import error_file, given_hyperparameters
from phalanx.worker.ending import is_failure
from phalanx.worker.process_group import seeds
from phalanx.worker.process_group.group import WorkerProcessGroup

logger = logging.getLogger(__name__)
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
    hyperparameters: Mapping[str, Any] | None = None,
) -> WorkerProcessGroup:
    """`group = phalanx.init()`: join the process group of this run, whatever launcher started the process.

    - `backend`: Default: `cpu:gloo,cuda:nccl` with a GPU, else the shared memory of phalanx or gloo
    - `method`: where to meet: `env://` (as the launcher says), `tcp://HOST:PORT`, `file:///SHARED/PATH`
    - `rank`: with `world_size`: only if no launcher sets them
    - `store`: a `torch.distributed` store to meet at, instead of `method`
    - `timeout`: seconds to wait for all ranks, and for every operation of the group. Default: 300
    - `seed`: of all random numbers, the same on every rank. Default: 0
    - `device`: Default: this rank's GPU, if there is one; "cpu" for none
    - `hyperparameters`: to record with the run, such as vars(args): `phalanx ps --json`, the page and the report show
      them. Default: those in the arguments of the script

    It waits until all ranks are here. Every rank then draws the same random numbers until its model is wrapped. The
    training API is on top of the group: `run = phalanx.Run(group)`.
    """
    given_hyperparameters.record(hyperparameters, environment())
    group = WorkerProcessGroup.join(
        backend,
        method=method,
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timeout,
        seed=seed,
        device=device,
    )
    group.seed_everything()
    return group


def main(train: Callable[[Run], Result], *, log_to: LogTo | Sequence[LogTo] | None = None, **options: Any) -> Result:
    """`phalanx.main(train)`: call `train` with a `Run`, close the run, and return what `train` returned.

        phalanx.main(train, seed=3, log_to="wandb")

    - `log_to`: where metrics go beside `metrics.jsonl` and TensorBoard: "wandb", "mlflow", a function of a step and its
      values, or a list of them
    - `options`: those of `phalanx.init`

    Under `phalanx run`, `train` is called again after a failure of another rank.

    Errors of phalanx itself (a wrong option, a missing rank, a broken checkpoint) are printed without a traceback, and
    the process exits with the exit code that the command line has for them. Any other exception propagates. Both are
    reported to the launcher at once, before the process ends.
    """
    try:
        if not callable(train):
            raise UsageError(f"main() takes a function, not {train!r}", fix="phalanx.main(train)")
        wrong_calls.check_train(train)
        wrong_calls.check_options(options, init)
        trackers(log_to)  # raises for an unknown one before the group forms
        seeds.check(options.get("seed", 0))
        given_hyperparameters.record(options.pop("hyperparameters", None), environment())
        line = environment().get(LINE)
        return _survive(train, line, options, log_to) if line else _run(train, options, log_to)
    except PhalanxError as error:
        error_file.write(error)
        notes: list[str] = getattr(error, "__notes__", [])
        where = error_file.in_lines(error_file.script_frames(error))
        error_file.print_once("\n  ".join([f"phalanx: {error}", *notes, *where]) + "\n")
        raise SystemExit(error.exit_code) from error
    except Exception as error:
        error_file.write(error)
        _leave_out_frames(error)
        raise


def call_with_run(train: Callable[[Run], Result]) -> Result:
    """Call `train` with the run of a rank that `phalanx.spawn` or `phalanx.launch` has started.

    They report its exceptions to their caller.
    """
    return main(train) if environment().get(LINE) else _run(train, {}, None)


def _leave_out_frames(error: Exception) -> None:
    """Leave the frames between `main` and the script out of the traceback that Python prints."""
    here = os.path.dirname(main.__code__.co_filename) + os.sep
    main_ = inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(here):
        inner = inner.tb_next
    if main_ is not None and inner is not None and inner is not main_:
        main_.tb_next = inner


def _run(train: Callable[[Run], Result], options: dict[str, Any], log_to: Any) -> Result:
    run = Run(init(**options), log_to=log_to)
    try:
        result = wrong_calls.call(train, run)
        run._finish()
    except BaseException as error:
        _close_after(error, run)
        raise
    run.group.close()
    return result


def _survive(train: Callable[[Run], Result], line: str, options: dict[str, Any], log_to: Any) -> Result:
    """Train under `phalanx run`, which replaces a rank that dies."""
    from phalanx.train.elastic_loop import ElasticLoop

    loop = ElasticLoop(line, options, log_to)
    try:
        run, result = loop.live(train)
    except Halted:
        if loop.run is not None:
            loop.run.group.close(failed=True)  # waits for no rank: the checkpoint is on disk
        raise SystemExit(0) from None  # the script must not continue as if the training were complete
    except BaseException as error:
        if loop.run is not None:
            _close_after(error, loop.run)
        close_all("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    finally:
        loop.close()
    run.group.close()
    return result


def _close_after(error: BaseException, run: Run) -> None:
    """Close the run after `error`. Further errors are added to it as notes: the first cause matters."""
    if isinstance(error, Exception):
        error_file.write(error)
    failed = is_failure(error)  # sys.exit(0) is not a failure
    try:
        run.group.close(failed=failed)
    except Exception as later:
        if not failed:
            raise
        logger.debug("closing the run after a failure", exc_info=True)
        error.add_note(f"and while the run was closed, {type(later).__name__}: {later}")
