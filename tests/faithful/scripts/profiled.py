"""torch.profiler and cProfile."""

import cProfile
import pstats

import torch
from torch.profiler import ProfilerActivity, profile, record_function

with profile(activities=[ProfilerActivity.CPU]) as prof, record_function("block"):
    torch.ones(100, 100) @ torch.ones(100, 100)
print(sorted(event.key for event in prof.key_averages() if event.key.startswith(("aten::ma", "block"))))


def work():
    return sum(range(1000))


profiler = cProfile.Profile()
profiler.runcall(work)
print(sorted(name[2] for name in pstats.Stats(profiler).stats))
