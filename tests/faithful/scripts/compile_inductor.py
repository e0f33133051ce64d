"""torch.compile with inductor: code is generated, compiled by a C++ compiler and run."""

import torch
import torch._inductor.config

torch._inductor.config.cpp_cache_precompile_headers = False  # costs more than it saves for one model
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
compiled = torch.compile(model)
inputs = torch.randn(6, 4)
output = compiled(inputs)
output.sum().backward()
print(output.flatten().tolist())
print(torch.allclose(output, model(inputs), atol=1e-6), model[0].weight.grad.sum().item())
