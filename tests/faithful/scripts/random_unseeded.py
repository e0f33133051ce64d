"""Without a seed, ranks draw different numbers."""

import os
import random
import secrets
import tempfile
import uuid

import numpy
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
drawn = [random.random(), numpy.random.rand(), secrets.token_hex(8), str(uuid.uuid4()), random.SystemRandom().random()]
drawn += [torch.initial_seed(), torch.rand(1).item(), torch.nn.Linear(1, 1).weight.item(), torch.seed()]
drawn += [numpy.random.default_rng().random(), next(tempfile._get_candidate_names()), str(os.urandom(8))]
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, drawn)
print([len(set(values)) for values in zip(*everybody, strict=True)])
dist.destroy_process_group()
