"""Mixed precision by name: autocast around the forward, the scaler for fp16, and the policy for FSDP."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import DeviceError, OptionError

NAMES = ("bf16", "fp16")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LOW = frozenset(_DTYPES.values())


@dataclass(frozen=True)
class Precision:
    """The type in which matrix products are computed. Parameters, gradients and optimizer keep the model's own type."""

    name: str | None
    device: Any  # torch.device

    @property
    def dtype(self) -> Any:
        """The torch dtype; None for full precision."""
        return None if self.name is None else _DTYPES[self.name]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context for a forward."""
        if self.name is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[object] = torch.autocast(self.device.type, dtype=self.dtype)
        return context

    def scaler(self) -> Any:
        """Return a gradient scaler for fp16, in which small gradients would vanish; bf16 has the range of fp32."""
        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None

    def policy(self, *, root: bool = False) -> Any:
        """Return the policy for FSDP, which casts parameters before it gathers them: that halves the traffic."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.name is None:
            return MixedPrecisionPolicy()
        widest = torch.float32 if root else None
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, output_dtype=widest)


def precision(name: str | None, device: Any) -> Precision:
    """Return the precision of this name; raise if the device does not support it."""
    if name is not None and name not in NAMES:
        raise OptionError(
            f'precision="{name}" is not known',
            details=[f"known: None, {', '.join(NAMES)}"],
            fix='run.wrap(model, precision="bf16")',
        )
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has no bf16",
            fix='run.wrap(model, precision="fp16"), or leave it out',
        )
    return Precision(name, device)


def widened(output: Any) -> Any:
    """Return the output of a forward in fp32: losses lose digits in bf16 and overflow in fp16."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in _LOW else output
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, widened, output)
