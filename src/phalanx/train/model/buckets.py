"""The layout of DDP's gradient buckets, so that a later DDP of the same model can use the same one.

After its first backward DDP rebuilds its buckets in the order in which gradients were ready. The order in which gloo
adds the numbers of the ranks depends on where in a bucket they are: with another layout, the first step of a new DDP
would round differently than that of the DDP which it replaces.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

Layout = list[list[int]]  # indices of parameters, per bucket


def layout(ddp: Any) -> Layout:
    """Return the layout for the next step. Empty: that of a new DDP, or it is not known."""
    if ddp.find_unused_parameters or ddp.reducer is None:
        return []
    try:
        ddp.logger.set_runtime_stats_and_log()  # as the next forward would
        data = ddp._get_ddp_logging_data()
        if known := data.get("rebuilt_per_bucket_param_indices"):
            return [[int(place) for place in bucket.split()] for bucket in known.split(",")]
        if ready := data.get("prev_iteration_grad_ready_order_indices"):
            return _after(ddp, [int(place) for place in ready.split(",")])
    except Exception:  # these are internals of torch, which another version may not have
        logger.debug("reading the layout of DDP's buckets", exc_info=True)
    return getattr(ddp, "given_layout", [])


def _after(ddp: Any, order: list[int]) -> Layout:
    """Return the layout that DDP computes in the next forward, for gradients that were ready in this order."""
    parameters, sparse = ddp._build_params_for_reducer()
    limits = [ddp._bucket_config.first_bucket_bytes_cap, ddp.bucket_bytes_cap]
    buckets, _ = dist._compute_bucket_assignment_by_size([parameters[place] for place in order], limits, sparse, order)
    return [list(bucket) for bucket in buckets]


@contextlib.contextmanager
def laid_out(wanted: Layout) -> Iterator[None]:
    """Give a DDP that is created within this context the wanted layout, if it has as many parameters."""
    theirs = getattr(dist, "_compute_bucket_assignment_by_size", None)
    if not wanted or theirs is None:
        yield
        return

    def ours(tensors: Any, limits: Any, *more: Any) -> Any:
        if sorted(place for bucket in wanted for place in bucket) != list(range(len(tensors))):
            return theirs(tensors, limits, *more)
        return [*reversed(wanted)], [limits[-1]] * len(wanted)  # DDP reverses them

    dist._compute_bucket_assignment_by_size = ours
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = theirs
