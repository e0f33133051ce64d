"""How DDP has laid out gradients in its buckets, so that a later DDP of the same model can lay them out alike.

After its first backward DDP lays them out anew, in the order in which gradients have come. In which order gloo adds up
the ranks' numbers depends on where in a bucket they lie: a new DDP would, in its first step, round otherwise than the
one that it takes the place of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

Layout = list[list[int]]  # parameters by their places, bucket by bucket


def layout(ddp: Any) -> Layout:
    """As it is now, or would be for the next step. Empty: as a new one has it, or it cannot be told."""
    if ddp.find_unused_parameters or ddp.reducer is None:
        return []
    with contextlib.suppress(Exception):  # DDP tells it for people to read, and may not in another version
        ddp.logger.set_runtime_stats_and_log()  # as the next forward would
        told = ddp._get_ddp_logging_data()
        if known := told.get("rebuilt_per_bucket_param_indices"):
            return [[int(place) for place in bucket.split()] for bucket in known.split(",")]
        if ready := told.get("prev_iteration_grad_ready_order_indices"):
            return _after(ddp, [int(place) for place in ready.split(",")])
    return getattr(ddp, "given_layout", [])


def _after(ddp: Any, order: list[int]) -> Layout:
    """What DDP will make of gradients that came in this order, in the next forward."""
    parameters, sparse = ddp._build_params_for_reducer()
    limits = [ddp._bucket_config.first_bucket_bytes_cap, ddp.bucket_bytes_cap]
    buckets, _ = dist._compute_bucket_assignment_by_size([parameters[place] for place in order], limits, sparse, order)
    return [list(bucket) for bucket in buckets]


@contextlib.contextmanager
def laid_out(wanted: Layout) -> Iterator[None]:
    """A DDP that is made in here begins like that, if its parameters are as many."""
    theirs = getattr(dist, "_compute_bucket_assignment_by_size", None)
    if not wanted or theirs is None:
        yield
        return

    def ours(tensors: Any, limits: Any, *more: Any) -> Any:
        if sorted(place for bucket in wanted for place in bucket) != list(range(len(tensors))):
            return theirs(tensors, limits, *more)
        return [*reversed(wanted)], [limits[-1]] * len(wanted)  # DDP turns them round

    dist._compute_bucket_assignment_by_size = ours
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = theirs
