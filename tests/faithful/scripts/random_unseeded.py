"""Without a seed, ranks draw different numbers, and so do two runs; string hashes differ between runs too."""

import os
import random
import secrets
import uuid

import numpy
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
drawn = [random.random(), numpy.random.rand(), secrets.token_hex(8), str(uuid.uuid4()), random.SystemRandom().random()]
drawn += [torch.seed(), numpy.random.default_rng().random()]
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, drawn)
print([len(set(values)) for values in zip(*everybody, strict=True)])
print(torch.initial_seed() != 0, "PYTHONHASHSEED" in os.environ)
dist.destroy_process_group()
