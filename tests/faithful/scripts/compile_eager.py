"""torch.compile with the eager backend: graphs, breaks and recompilations."""

import torch
import torch._dynamo


@torch.compile(backend="eager")
def step(x, scale):
    x = x.sin() * scale
    if x.sum() > 0:
        return x + 1
    return x - 1


torch.manual_seed(0)
for size in (3, 4, 5):
    print(step(torch.randn(size), 2.0).tolist())
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], dict(torch._dynamo.utils.counters["graph_break"]) != {})
print(torch._dynamo.explain(lambda x: x * 2)(torch.ones(2)).graph_count)
