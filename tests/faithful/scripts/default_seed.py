"""torch without a seed: its first numbers are those of its default seed, in every rank."""

import torch

print(torch.initial_seed(), torch.rand(3).tolist(), torch.randperm(6).tolist())
print(torch.nn.Linear(2, 2).weight.tolist(), torch.get_rng_state().sum().item())
print(torch.utils.data.RandomSampler(range(5)).generator)
