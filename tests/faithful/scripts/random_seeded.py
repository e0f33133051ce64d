"""Fixed seeds give the same numbers in every run."""

import os
import random

import numpy
import torch

seed = 1234 + int(os.environ["RANK"])
random.seed(seed)
numpy.random.seed(seed)
torch.manual_seed(seed)
print(random.random(), random.sample(range(1000), 5), random.gauss(0, 1))
print(repr(numpy.random.rand(3)), numpy.random.default_rng(seed).integers(1000, size=4))
print(torch.rand(4).tolist(), torch.randn(3).tolist(), torch.randperm(10).tolist())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
print([parameter.sum().item() for parameter in model.parameters()])
print(model(torch.ones(2, 4)).tolist(), torch.initial_seed(), torch.default_generator.get_state().sum().item())
print(torch.tensor(0.1).sin().item(), torch.linalg.svdvals(torch.randn(5, 5)).tolist())
