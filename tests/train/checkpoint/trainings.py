"""Models and optimizers whose state the checkpoint tests save and load."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch._dynamo  # imported by the first optimizer; it sets TORCHINDUCTOR_CACHE_DIR, and a test must not
from torch import nn

DTYPES = (
    *(torch.float64, torch.float16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64),
)


class Odd(nn.Module):
    """A model with every kind of parameter, buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))
        self.across = nn.Parameter(torch.randn(4, 3).t())  # not contiguous
        self.alone = nn.Parameter(torch.randn(()))
        self.brief = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor([2**62, -1]))
        for dtype in DTYPES:
            self.register_buffer(str(dtype).removeprefix("torch."), torch.tensor([[1, 0, 1]]).to(dtype))
        self.tied = self.body[3]
        self.words = ["not", {"a": 1}, None]

    def get_extra_state(self) -> object:
        return {"words": self.words, "tensors": [torch.ones(1), (torch.zeros(2), None)]}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]
        assert torch.equal(state["tensors"][1][0], torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x) * self.alone
        return (y @ self.across.t()).sum() + self.brief.float().sum()


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Odd()
        self.opt = torch.optim.AdamW(
            [{"params": list(self.model.body.parameters())}, {"params": [self.model.across], "lr": 0.5}], lr=0.01
        )
        self.other = torch.optim.SGD([self.model.alone, self.model.brief], lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.opt, [2, 4])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @property
    def kept(self) -> dict[str, object]:
        return {
            "model": self.model,
            "opt": self.opt,
            "other": self.other,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def step(self) -> None:
        self.model(torch.randn(8, 6) * random.random()).backward()
        self.opt.step()
        self.other.step()
        self.schedule.step()
        self.opt.zero_grad()
        self.other.zero_grad()

    def values(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values() if isinstance(value, torch.Tensor)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit-equal, for all dtypes: torch.equal does not support some."""
    raw = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
