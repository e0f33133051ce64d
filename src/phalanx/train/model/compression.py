"""Gradient compression by name: half precision, or matrices of low rank (PowerSGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import OptionError

NAMES = ("fp16", "bf16", "powersgd")


@dataclass(frozen=True)
class PowerSGD:
    """`compress=PowerSGD(rank=4)`: send matrices of that rank, after `start` uncompressed steps, with error feedback.

    Checkpoints do not contain the errors: a resumed training starts with `start` uncompressed steps again.
    """

    rank: int = 2
    start: int = 1000

    def __post_init__(self) -> None:
        # DDP rebuilds its buckets in the first step, and error feedback must not see that.
        if self.rank < 1 or self.start < 2:
            raise OptionError(
                f"PowerSGD(rank={self.rank}, start={self.start}): rank must be 1 or more, start 2 or more",
                fix="PowerSGD(rank=2, start=1000)",
            )


Compress = str | PowerSGD | None


def check(compress: Compress) -> None:
    """Raise OptionError if the name is not known."""
    if isinstance(compress, str) and compress not in NAMES:
        raise OptionError(
            f'compress="{compress}" is not known',
            details=[f"known: None, {', '.join(NAMES)}, PowerSGD(rank=2, start=1000)"],
            fix='run.wrap(model, compress="bf16")',
        )


def register(ddp: Any, compress: Compress) -> None:
    """Register the communication hook at DDP."""
    if compress is None:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if compress == "powersgd":
        compress = PowerSGD()
    if isinstance(compress, PowerSGD):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=compress.rank, start_powerSGD_iter=compress.start
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook: Any = default_hooks.fp16_compress_hook if compress == "fp16" else default_hooks.bf16_compress_hook
        if compress == "bf16" and ddp.device_type == "cpu":
            hook = _bf16_on_cpu
        ddp.register_comm_hook(None, hook)


# DDP recognises torch's hook by its name and requires NCCL for it, but gloo and shm can sum bf16 too. It also checks
# annotations, which must be the classes themselves or absent.
def _bf16_on_cpu(group, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(group, bucket)
